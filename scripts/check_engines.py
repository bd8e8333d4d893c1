"""Generates the same tokens with every policy and transfer engine, and with faults under way, and compares them.

    python -m scripts.check_engines [MODEL] --steps 1000 --json engines.json

The reference is policy `full` at residency 1. Then the policies at `--residency`; policy `seqmoe` with the model's
predictor and each transfer engine; and each engine again while the link is throttled, while transfers are reported
late, while every third is dropped, and while its worker is killed in mid-generation. Exit status 1 where a token
differs, or where nothing was shown: no expert missed, no transfer landed, none was dropped, a dead worker not reported.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import jax

from seqmoe_jax.compilation import enable_compilation_cache
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import SeqMoEError
from seqmoe_jax.loading import find_and_load_predictor, load_model
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.prefetch.engine import ENGINES, Faults, Moved
from seqmoe_jax.text import open_tokenizer

# Of one bucket of lengths, so that all of them run in the same programs.
PROMPTS = (
    "def fibonacci(n):",
    "Once upon a time, there was",
    "A hash table is",
    "Question: Tom has 5 boxes",
    "class Stack:\n    def push(self",
)
FAULTS = {
    "throttled": Faults(throttle_s=1e-3),
    "delayed": Faults(delay_s=1e-3),
    "dropped": Faults(drop_every=3),
    "killed": Faults(),
}
POLICIES = ("lru", "lfu", "prefill-hot", "seqmoe")

Tokens = list[list[int]]


def announce(message: str) -> None:
    print(f"{time.perf_counter():9.1f} s  {message}", file=sys.stderr, flush=True)


def generate(engine: TokenEngine, prompts: Tokens, steps: int, *, kill: bool = False) -> tuple[Tokens, dict[str, Any]]:
    """Tokens of `steps` decode steps and the first, for each prompt; and what the engine did.

    `kill` ends the transfer worker in the middle of the first prompt's.
    """
    transfers = engine.transfers
    before = Moved() if transfers is None else transfers.moved()
    tokens: Tokens = []
    hits: list[float] = []
    faults: list[str] = []
    for prompt in prompts:
        new: list[int] = []
        for event in engine.run([prompt], max_new_tokens=steps + 1):
            new.append(event.token)
            if kill and transfers is not None and not tokens and len(new) == steps // 2:
                transfers.kill()
        tokens.append(new)
        hits.append(engine.last_stats.hit_rate)
        if transfers is not None and (fault := transfers.fault()):
            faults.append(fault)
    after = Moved() if transfers is None else transfers.moved()
    moved = {name: count - getattr(before, name) for name, count in asdict(after).items()}
    return tokens, {"hit_rate": sum(hits) / len(hits), **moved, "faults": list(dict.fromkeys(faults))}


def shown(row: dict[str, Any]) -> bool:
    """Whether what the row is about has happened."""
    fault, offloaded = row["fault"], row["hit_rate"] < 1
    if row["transfers"] == "none":
        return offloaded
    tried = row["landed"] + row["given_up"] + row["late"]
    happened = {
        "": row["landed"] > 0 and not row["faults"],
        "dropped": row["dropped"] > 0,
        "killed": bool(row["faults"]),
    }
    return offloaded and happened.get(fault, tried > 0)


def check(
    engine: TokenEngine, reference: Tokens, prompts: Tokens, steps: int, faults: dict[str, Faults]
) -> Iterator[dict[str, Any]]:
    """A row for the engine as it is, and one for each fault; all in the same compiled programs."""
    transfers = engine.transfers
    for name, fault in {"": Faults(), **(faults if transfers is not None else {})}.items():
        if transfers is not None:
            transfers.inject(fault)
        begun = time.perf_counter()
        tokens, done = generate(engine, prompts, steps, kill=name == "killed")
        compared = list(zip(chain(*tokens), chain(*reference), strict=True))
        row: dict[str, Any] = {
            "policy": engine.policy,
            "forecast": engine.forecast_name,
            "transfers": engine.transfers_name,
            "fault": name,
            "steps": steps * len(prompts),
            "equal": tokens == reference,
            "first_difference": next((index for index, (a, b) in enumerate(compared) if a != b), None),
            "seconds": round(time.perf_counter() - begun, 1),
            **done,
        }
        yield row | {"ok": row["equal"] and shown(row)}


def describe(row: dict[str, Any]) -> str:
    name = " ".join(filter(None, (row["policy"], row["forecast"] if row["policy"] == "seqmoe" else "")))
    equal = "yes" if row["equal"] else f"no, from {row['first_difference']}"
    counts = " ".join(f"{row[count]:8}" for count in ("landed", "given_up", "late", "dropped"))
    end = "" if row["ok"] or not row["equal"] else "   NOTHING SHOWN"
    return (
        f"{name:24} {row['transfers']:10} {row['fault']:9} {row['steps']:5} {equal:12} {row['hit_rate']:8.3f} {counts} "
        f"{row['seconds']:7.1f}  {'; '.join(row['faults'])}{end}"
    )


HEADER = (
    f"{'policy':24} {'transfers':10} {'fault':9} {'steps':5} {'equal':12} hit rate   landed given up     late  dropped"
    "       s  reported"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--engines", nargs="*", choices=[name for name in ENGINES if name != "auto"],
                        help="transfer engines (default: all that this backend has)")  # fmt: skip
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=POLICIES, help="without a predictor")
    parser.add_argument("--steps", type=int, default=1000, help=f"over {len(PROMPTS)} prompts (default: 1000)")
    parser.add_argument("--residency", type=float, default=0.25)
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    steps = args.steps // len(PROMPTS)
    if steps < 20:  # a dead worker is noticed within 64 steps
        parser.error(f"--steps must be at least {20 * len(PROMPTS)}, got {args.steps}")
    names = args.engines
    if names is None:
        names = [name for name in ENGINES if name != "auto" and (name != "dma" or jax.default_backend() == "gpu")]
    enable_compilation_cache()
    try:
        model, directory = load_model(args.model)
        predictor = find_and_load_predictor("auto", model) if names else None
        if names and predictor is None:
            parser.error(f"{args.model} has no predictor that ships: give --engines without names to check policies")
        full = TokenEngine(model, EngineOptions(policy="full", residency=1.0), announce=announce)
        engines = [
            TokenEngine(model, EngineOptions(policy=policy, residency=args.residency), announce=announce)
            for policy in args.policies
        ]
        engines += [
            TokenEngine(
                model, EngineOptions(residency=args.residency, transfers=name), predictor=predictor, announce=announce
            )
            for name in names
        ]
    except SeqMoEError as error:
        parser.error(str(error))
    prompts = [open_tokenizer(directory).encode(prompt) for prompt in PROMPTS]
    reference, _ = generate(full, prompts, steps)
    # The reference first: what XLA has tuned for it (which product of matrices is fastest) it takes for the others too.
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda engine: next(engine.run(prompts[:1], max_new_tokens=steps + 1)), engines))
    device = jax.devices()[0].device_kind
    print(f"{args.model} on {device}, residency {args.residency}")
    print(HEADER, flush=True)
    rows = []
    for engine in engines:
        try:
            for row in check(engine, reference, prompts, steps, FAULTS):
                rows.append(row)
                print(describe(row), flush=True)
        finally:
            engine.close()
    good = all(row["ok"] for row in rows)
    if args.json:
        summary = {"model": args.model, "device": device, "residency": args.residency, "ok": good, "rows": rows}
        args.json.write_text(json.dumps(summary, indent=1))
    print("every token equal" if good else "FAILED: see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
