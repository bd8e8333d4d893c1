"""Whether prefill routes every token as decoding it did, which `seqmoe trace` relies on: counts the same experts.

    python -m scripts.checks.replay [MODEL] --new 161

Decodes eight prompts greedily, listening inside the decode step, then asks for the routing of the same tokens.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np

from seqmoe_jax.api import load
from seqmoe_jax.decode import layer
from seqmoe_jax.experts.cache import moe_decode

PROMPTS = (
    "def fibonacci(n):", "Once upon a time", "ROMEO:\n", "public class Stack {", "Question: Tom has 5 boxes",
    "hacker\n n.", "The president said that", "class Foo(Bar):",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--new", type=int, default=161, help="tokens per prompt (default: 161)")
    args = parser.parse_args()
    heard: dict[int, np.ndarray] = {}

    def listening(x: Any, ids: Any, weights: Any, slots: Any, pool: Any, index: Any, *rest: Any) -> Any:
        jax.debug.callback(lambda clock, now: heard.update({int(clock): np.array(now)}), slots.clock + index, ids)
        return moe_decode(x, ids, weights, slots, pool, index, *rest)

    layer.moe_decode = listening  # type: ignore[attr-defined, assignment]
    # Rule lru counts the layers that ran: that orders what is heard.
    engine = load(args.model, residency=0.9, policy="lru", max_batch=len(PROMPTS))
    prompts = [engine.request(prompt).tokens for prompt in PROMPTS]
    new: list[list[int]] = [[] for _ in prompts]
    for event in engine.token_engine.run(prompts, max_new_tokens=args.new):
        new[event.sequence].append(event.token)
    jax.effects_barrier()
    replayed = engine.token_engine.routing([[*old, *more[:-1]] for old, more in zip(prompts, new, strict=True)])
    again = np.stack([ids[len(prompt) :] for prompt, (ids, _) in zip(prompts, replayed, strict=True)], axis=2)
    steps, layers = again.shape[:2]  # [steps, layers, prompts, K]
    decoded = np.stack([heard[clock] for clock in sorted(heard)][: steps * layers]).reshape(again.shape)
    same = int((decoded[..., :, None] == again[..., None, :]).any(-1).sum())
    print(f"{same} of {again.size} routed experts are the same, over {steps * len(prompts)} decode steps")


if __name__ == "__main__":
    main()
