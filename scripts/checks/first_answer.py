"""From an engine that has just been made to the first token of a prompt, in a process of its own: what is compiled.

    python -m scripts.checks.first_answer qwen3-30b-a3b-fp8      # once with no cache, then again with a warm one

Random weights. `SEQMOE_CACHE_DIR` says where programs are cached; a directory that is new is a cold start.
"""

from __future__ import annotations

import argparse
import json
import time

import jax
import numpy as np

from seqmoe_jax.compilation import enable_compilation_cache
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.loading import random_model
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.presets import preset_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="qwen3-30b-a3b-fp8")
    parser.add_argument("--residency", type=float, default=0.45)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    args = parser.parse_args()
    enable_compilation_cache()
    model = random_model(preset_path(args.preset), name=args.preset)
    jax.block_until_ready(model.weights)
    engine = TokenEngine(model, EngineOptions(residency=args.residency, context=args.context))
    prompt = np.random.default_rng(0).integers(0, model.spec.vocab, args.prompt_tokens).tolist()
    begun = time.perf_counter()
    run = engine.run([prompt], max_new_tokens=32)
    first = next(run)
    seconds = time.perf_counter() - begun
    tokens = [first.token, *(event.token for event in run)]
    print(
        json.dumps(
            {"first_token_s": seconds, "waited_for_compiler_s": engine.last_stats.compile_s, "tokens": tokens[:8]}
        )
    )


if __name__ == "__main__":
    main()
