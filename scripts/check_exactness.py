"""Generates the same prompts at every residency and policy, alone and as a batch, and compares the tokens.

python scripts/check_exactness.py demo --out exactness.json

The reference is policy `full` at residency 1. Prints a table; exit status 1 where a token differs, or where a
residency below 1 never missed (then nothing was offloaded and nothing was shown).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from seqmoe_jax.compilation import enable_compilation_cache
from seqmoe_jax.engine import Model, TokenEngine
from seqmoe_jax.experts.policy import POLICIES
from seqmoe_jax.loading import load_model
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.text import eos_token_ids, open_tokenizer

PROMPTS = (
    "def fibonacci(n):",
    "Once upon a time, there was",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many",
    "A hash table is",
    "class Stack:\n    def __init__(self):",
)
RESIDENCIES = ("least", 0.15, 0.25, 0.45, 1.0)


def announce(message: str) -> None:
    print(f"{time.perf_counter():9.1f} s  {message}", file=sys.stderr, flush=True)


def generate(engine: TokenEngine, prompts: list[list[int]], new: int, ends: tuple[int, ...]) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    for event in engine.run(prompts, max_new_tokens=new, end_tokens=ends):
        tokens[event.sequence].append(event.token)
    return tokens


def run(
    model: Model, prompts: list[list[int]], ends: tuple[int, ...], *, policy: str, residency: Any, new: int
) -> dict[str, Any]:
    """Tokens and hit rates of one residency and policy."""
    row: dict[str, Any] = {"policy": policy, "residency": residency}
    for name, batch in (("single", 1), ("batch", 4)):
        if (
            residency != "least"
            and residency < 1
            and int(residency * model.spec.num_keys) < batch * model.spec.moe.top_k
        ):
            row[name] = None  # refused, and rightly so
            continue
        engine = TokenEngine(
            model, EngineOptions(policy=policy, residency=residency, max_batch=batch), announce=announce
        )
        groups = [[prompt] for prompt in prompts] if batch == 1 else [prompts[:4]]
        tokens, hits = [], []
        for group in groups:
            tokens += generate(engine, group, new, ends)
            hits.append(engine.last_stats.hit_rate)
        row[name] = {"slots": engine.plan.slots, "tokens": tokens, "hit_rate": sum(hits) / len(hits)}
        row["kernels"] = engine.config.implementation
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--residencies", nargs="+", default=list(RESIDENCIES))
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    enable_compilation_cache()
    model, directory = load_model(args.model)
    tokenizer, ends = open_tokenizer(directory), eos_token_ids(directory)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    options = dict(ends=ends, new=args.max_new_tokens)
    reference = run(model, prompts, policy="full", residency=1.0, **options)
    rows, good = [], True
    for residency in args.residencies:
        value = residency if residency == "least" else float(residency)
        for policy in args.policies:
            row = run(model, prompts, policy=policy, residency=value, **options)
            for name in ("single", "batch"):
                if row[name] is not None:
                    row[name]["identical"] = row[name].pop("tokens") == reference[name]["tokens"]
                    offloaded = value == 1.0 or row[name]["hit_rate"] < 1
                    good &= row[name]["identical"] and offloaded
            rows.append(row)
            print(json.dumps(row), flush=True)
    summary = {
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "all_identical": good,
        "reference_tokens": reference["single"]["tokens"],
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(summary))
    print("every token identical, and experts missed wherever residency < 1" if good else "DIFFERENCES: see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
