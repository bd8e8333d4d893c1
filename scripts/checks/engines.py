"""Generates the same tokens with every policy and transfer engine, and with faults under way, and compares them.

    python -m scripts.checks.engines [MODEL] --steps 1000 --json engines.json

The reference is policy `full` at residency 1. Then the policies at `--residency`; policy `seqmoe` with the model's
predictor and each transfer engine; and each engine again while the link is throttled, while transfers are reported
late, while every third is dropped, and while it breaks in mid-generation, which ends the worker. Exit status 1 where a
token differs, or where nothing was shown: no expert missed, no transfer landed, none was dropped, a dead worker not
reported.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import jax

from scripts.checks.faults import Faults, injected
from seqmoe_jax.compilation import enable_compilation_cache
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import SeqMoEError
from seqmoe_jax.forecast.trained import TrainedPredictor
from seqmoe_jax.loading import find_and_load_predictor, load_model
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.prefetch.engine import ENGINES, TransferCounts
from seqmoe_jax.text import open_tokenizer

# Of one bucket of lengths, so that all of them run in the same programs.
PROMPTS = (
    "def fibonacci(n):",
    "Once upon a time, there was",
    "A hash table is",
    "Question: Tom has 5 boxes",
    "class Stack:\n    def push(self",
)
FAULTS: dict[str, dict[str, Any]] = {
    "throttled": {"throttle_s": 1e-3},
    "delayed": {"delay_s": 1e-3},
    "dropped": {"drop_every": 3},
    "broken": {},  # from the middle of the first prompt's generation on
}
POLICIES = ("lru", "lfu", "prefill-hot", "seqmoe")

Tokens = list[list[int]]


def announce(message: str) -> None:
    print(f"{time.perf_counter():9.1f} s  {message}", file=sys.stderr, flush=True)


def generate(
    engine: TokenEngine, prompts: Tokens, steps: int, broken: Faults | None = None
) -> tuple[Tokens, dict[str, Any]]:
    """Tokens of `steps` decode steps and the first, for each prompt; what the engine did. `broken`: see `FAULTS`."""
    transfers = engine.transfers
    before = TransferCounts() if transfers is None else transfers.counts()
    tokens, hits, reported = list[list[int]](), list[float](), list[str]()
    for prompt in prompts:
        new: list[int] = []
        for event in engine.run([prompt], max_new_tokens=steps + 1):
            new.append(event.token)
            if broken is not None and len(new) == steps // 2:
                broken.broken = True
        tokens.append(new)
        hits.append(engine.last_stats.hit_rate)
        if transfers is not None and (fault := transfers.fault()):
            reported.append(fault)
    counts = before if transfers is None else transfers.counts().since(before)
    return tokens, {"hit_rate": sum(hits) / len(hits), **asdict(counts), "faults": list(dict.fromkeys(reported))}


def shown(row: dict[str, Any]) -> bool:
    """Whether what the row is about has happened."""
    happened = {
        "": row["transfers"] == "none" or (row["landed"] > 0 and not row["faults"]),
        "dropped": row["dropped"] > 0,
        "broken": bool(row["faults"]),
    }
    tried = row["landed"] + row["given_up"] + row["late"] > 0
    return bool(row["hit_rate"] < 1 and happened.get(row["fault"], tried))


def check(engine: TokenEngine, reference: Tokens, prompts: Tokens, steps: int) -> Iterator[dict[str, Any]]:
    """A row for the engine as it is, and one for each fault; all in the same compiled programs."""
    transfers = engine.transfers
    for name, behaviour in {"": {}, **(FAULTS if transfers is not None else {})}.items():
        faults, begun = Faults(**behaviour), time.perf_counter()
        with nullcontext() if transfers is None or not name else injected(transfers, faults):
            tokens, done = generate(engine, prompts, steps, faults if name == "broken" else None)
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
            "dropped": faults.dropped,
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
        settings: list[tuple[dict[str, Any], TrainedPredictor | None]] = [
            ({"policy": name}, None) for name in args.policies
        ]
        settings += [({"transfers": name}, predictor) for name in names]
        engines = [
            TokenEngine(model, EngineOptions(residency=args.residency, **chosen), predictor=used, announce=announce)
            for chosen, used in settings
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
            for row in check(engine, reference, prompts, steps):
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
