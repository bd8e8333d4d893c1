"""Generates the same prompts at every residency and policy, alone and as a batch, and compares the tokens.

    python -m scripts.checks.exactness demo --out exactness.json

The reference is policy `full` at residency 1. Prints a row of JSON for each setting; exit status 1 where a token
differs, or where a residency below 1 never missed (then nothing was offloaded and nothing was shown).
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any, get_args

import jax

from seqmoe_jax.cli.arguments import residency as residency_of
from seqmoe_jax.compilation import enable_compilation_cache
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.loading import load_model
from seqmoe_jax.memory.plan import least_slots
from seqmoe_jax.models.model import Model
from seqmoe_jax.options import EngineOptions, Policy
from seqmoe_jax.text import eos_token_ids, open_tokenizer

PROMPTS = (
    "def fibonacci(n):",
    "Once upon a time, there was",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many",
    "A hash table is",
    "class Stack:\n    def __init__(self):",
)
BATCH = 4


def run(model: Model, groups: list[list[list[int]]], options: EngineOptions, **how: Any) -> dict[str, Any]:
    """Tokens of all prompts, the groups one after the other, and the mean hit rate."""
    engine = TokenEngine(model, options, announce=lambda message: print(message, file=sys.stderr, flush=True))
    tokens: list[list[int]] = []
    hits = []
    for group in groups:
        new: list[list[int]] = [[] for _ in group]
        for event in engine.run(group, **how):
            new[event.sequence].append(event.token)
        tokens += new
        hits.append(engine.last_stats.hit_rate)
    return {"slots": engine.plan.slots, "kernels": engine.config.implementation, "hit_rate": sum(hits) / len(hits),
            "tokens": tokens}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--policies", nargs="+", default=list(get_args(Policy)))
    parser.add_argument("--residencies", nargs="+", type=residency_of, default=["least", 0.15, 0.25, 0.45, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    enable_compilation_cache()
    model, directory = load_model(args.model)
    how = dict(max_new_tokens=args.max_new_tokens, eos_token_ids=eos_token_ids(directory))
    prompts = [open_tokenizer(directory).encode(prompt) for prompt in PROMPTS]
    groups = {1: [[prompt] for prompt in prompts], BATCH: [prompts[:BATCH]]}
    reference = {
        batch: run(model, group, EngineOptions(policy="full", residency=1.0, max_batch=batch), **how)["tokens"]
        for batch, group in groups.items()
    }
    rows = []
    for residency, policy, (batch, group) in product(args.residencies, args.policies, groups.items()):
        if residency != "least" and int(residency * model.spec.num_keys) < least_slots(model.spec, batch):
            continue  # refused, and rightly so
        row = run(model, group, EngineOptions(policy=policy, residency=residency, max_batch=batch), **how)
        identical, offloaded = row.pop("tokens") == reference[batch], residency == 1.0 or row["hit_rate"] < 1
        row = {"policy": policy, "residency": residency, "batch": batch, "identical": identical,
               "ok": identical and offloaded, **row}  # fmt: skip
        rows.append(row)
        print(json.dumps(row), flush=True)
    good = all(row["ok"] for row in rows)
    if args.out:
        device = jax.devices()[0].device_kind
        summary = {"device": device, "all_identical": good, "reference_tokens": reference[1], "rows": rows}
        args.out.write_text(json.dumps(summary))
    print("every token identical, and experts missed wherever residency < 1" if good else "DIFFERENCES: see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
