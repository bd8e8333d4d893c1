"""Generates for a long time, never twice the same, and checks that nothing grows and nothing is compiled again.

    python -m scripts.soak [MODEL] --minutes 30 --json soak.json

Batches of 1 to 4 random prompts of random lengths, greedy or drawn, some abandoned midway, under policy `seqmoe` with
the model's predictor and a transfer engine. Every 30 s the same prompt is generated again: its tokens must not change,
and after it host memory (resident set), device memory, live JAX arrays and threads are compared with those after the
warm-up, in which every shape occurs once. Exit status 1 where one has grown beyond its tolerance, where anything was
compiled after the warm-up, or where the engine reports a fault. Linux (it reads /proc).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seqmoe_jax.compilation import enable_compilation_cache
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import SeqMoEError
from seqmoe_jax.loading import find_and_load_predictor, load_model
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.prefetch.engine import ENGINES
from seqmoe_jax.prefill.programs import bucket
from seqmoe_jax.sampling import SamplingConfig

CONTEXT = 256  # positions, the least that is allocated: one set of programs serves every length
LONGEST_PROMPT, LONGEST_NEW, MAX_BATCH = 64, 160, 4
ABANDONED = 0.1  # share of the generations
EVERY_S = 30.0
MIB = 2**20
# What the resident set may grow by: Python's and malloc's arenas settle for some minutes, a leak of 8 KiB a request
# passes this within 30 minutes of the demo model on two cores.
HOST_TOLERANCE_MIB = 64
DEVICE_TOLERANCE_MIB = 1


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What must not grow. Bytes are in MiB; `device_mib` is None on backends that do not say."""

    host_mib: float
    device_mib: float | None
    arrays: int
    array_mib: float
    threads: int

    @classmethod
    def now(cls) -> Reading:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        stats = jax.devices()[0].memory_stats() or {}
        arrays = jax.live_arrays()
        return cls(
            host_mib=pages * 4096 / MIB,
            device_mib=stats["bytes_in_use"] / MIB if "bytes_in_use" in stats else None,
            arrays=len(arrays),
            array_mib=sum(array.nbytes for array in arrays) / MIB,
            threads=threading.active_count(),
        )

    def grown_since(self, before: Reading) -> list[str]:
        """What has grown beyond its tolerance, in words."""
        tolerances = {
            "host_mib": HOST_TOLERANCE_MIB, "device_mib": DEVICE_TOLERANCE_MIB, "arrays": 0,
            "array_mib": DEVICE_TOLERANCE_MIB, "threads": 0,
        }  # fmt: skip
        grown = []
        for name, tolerance in tolerances.items():
            old, new = getattr(before, name), getattr(self, name)
            if old is not None and new - old > tolerance:
                grown.append(f"{name} grew from {old:.1f} to {new:.1f}; {tolerance} more is tolerated")
        return grown


class Soak:
    """Random generations on one engine, and what they have come to."""

    def __init__(self, engine: TokenEngine, seed: int):
        self.engine, self.rng = engine, np.random.default_rng(seed)
        self.requests = self.tokens = 0
        self.faults: list[str] = []

    def generate(self, lengths: list[int], new: list[int], *, greedy: bool, abandon: bool = False) -> None:
        """Random prompts of these lengths, so many new tokens after each; `abandon` leaves after a random few."""
        rng = self.rng
        prompts = [rng.integers(0, self.engine.model.spec.vocab, length).tolist() for length in lengths]
        drawn = SamplingConfig(
            temperature=float(rng.uniform(0.3, 1.5)), top_k=int(rng.integers(0, 50)), top_p=float(rng.uniform(0.5, 1)),
            min_p=float(rng.uniform(0, 0.1)), seed=int(rng.integers(0, 2**31)),
        )  # fmt: skip
        run = self.engine.run(prompts, max_new_tokens=new, sampling=SamplingConfig() if greedy else drawn)
        last = int(rng.integers(1, 1 + sum(new))) if abandon else sum(new)
        for _ in range(last):
            next(run)
        run.close()
        self._count(last)

    def at_random(self) -> None:
        count = int(self.rng.integers(1, MAX_BATCH + 1))
        lengths = self.rng.integers(1, LONGEST_PROMPT + 1, count).tolist()
        new = self.rng.integers(1, LONGEST_NEW + 1, count).tolist()
        greedy, abandon = self.rng.random() < 0.5, self.rng.random() < ABANDONED
        self.generate(lengths, new, greedy=greedy, abandon=abandon)

    def warm_up(self) -> None:
        """Every batch size, bucket of prompt lengths and way of sampling once."""
        widths = sorted({bucket(length) for length in range(1, LONGEST_PROMPT + 1)})
        for count, width, greedy in product(range(1, MAX_BATCH + 1), widths, (True, False)):
            self.generate([width] * count, [3] * count, greedy=greedy)

    def same_again(self) -> list[int]:
        """The tokens of a prompt that is always the same."""
        prompt = [index % self.engine.model.spec.vocab for index in range(1, 20)]
        tokens = [event.token for event in self.engine.run([prompt], max_new_tokens=LONGEST_NEW)]
        self._count(len(tokens))
        return tokens

    def _count(self, tokens: int) -> None:
        self.requests, self.tokens = self.requests + 1, self.tokens + tokens
        if (transfers := self.engine._transfers) is not None and (fault := transfers.fault()):
            self.faults.append(fault)


def soak(engine: TokenEngine, minutes: float, seed: int) -> dict[str, Any]:
    """Everything the run came to; `violations` is empty where it went well."""
    compilations = 0

    def heard(event: str, duration_secs: float, **_: str | int) -> None:
        nonlocal compilations
        compilations += "backend_compile" in event

    jax.monitoring.register_event_duration_secs_listener(heard)
    runs = Soak(engine, seed)
    begun = time.perf_counter()
    runs.warm_up()
    tokens = runs.same_again()
    before, warm = Reading.now(), compilations
    say(f"warm after {time.perf_counter() - begun:.0f} s, {warm} compilations: {describe(before)}")
    begun, counted, reported = time.perf_counter(), (runs.requests, runs.tokens), 0
    violations: list[str] = []
    readings = [before]
    while not violations and (elapsed := time.perf_counter() - begun) < 60 * minutes:
        if elapsed >= (reported + 1) * EVERY_S:
            reported = int(elapsed / EVERY_S)
            violations = look(runs, tokens, before, readings, compilations - warm)
            say(
                f"{elapsed:6.0f} s  {runs.requests} requests, {runs.tokens} tokens, "
                f"{compilations - warm} compilations since: {describe(readings[-1])}"
            )
        runs.at_random()
    violations = violations or look(runs, tokens, before, readings, compilations - warm)
    seconds = time.perf_counter() - begun
    moved = engine._transfers.moved() if engine._transfers is not None else None
    return {
        "seconds": round(seconds, 1),
        "requests": runs.requests - counted[0],
        "tokens": runs.tokens - counted[1],
        "compilations": {"warm_up": warm, "after": compilations - warm},
        "transfers": engine.transfers_name,
        "moved": None if moved is None else asdict(moved),
        "after_warm_up": asdict(before),
        "at_the_end": asdict(readings[-1]),
        "highest_host_mib": max(reading.host_mib for reading in readings),
        "tolerance": {"host_mib": HOST_TOLERANCE_MIB, "device_mib": DEVICE_TOLERANCE_MIB, "arrays": 0, "threads": 0},
        "violations": violations,
    }


def look(runs: Soak, tokens: list[int], before: Reading, readings: list[Reading], compiled: int) -> list[str]:
    """What is wrong by now, in words."""
    again = runs.same_again()
    readings.append(Reading.now())
    wrong = readings[-1].grown_since(before)
    if again != tokens:
        wrong.append("the same prompt gave other tokens than after the warm-up")
    if compiled:
        wrong.append(f"{compiled} compilations after the warm-up")
    return wrong + runs.faults


def describe(reading: Reading) -> str:
    device = "" if reading.device_mib is None else f"device {reading.device_mib:.1f} MiB, "
    return (
        f"host {reading.host_mib:.1f} MiB, {device}{reading.arrays} arrays of {reading.array_mib:.1f} MiB, "
        f"{reading.threads} threads"
    )


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--minutes", type=float, default=30.0, help="after the warm-up (default: 30)")
    parser.add_argument("--residency", type=float, default=0.25)
    parser.add_argument("--predictor", default="auto", help="auto, none, or a directory (default: auto)")
    parser.add_argument("--transfers", choices=ENGINES, help="default: dma on a GPU, else device_put")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the summary there too")
    args = parser.parse_args()
    enable_compilation_cache()
    transfers = args.transfers or ("dma" if jax.default_backend() == "gpu" else "device_put")
    try:
        model, _ = load_model(args.model)
        engine = TokenEngine(model, EngineOptions(residency=args.residency, transfers=transfers, max_batch=MAX_BATCH, context=CONTEXT), predictor=find_and_load_predictor(args.predictor, model))  # fmt: skip
    except SeqMoEError as error:
        parser.error(str(error))
    try:
        summary = {"model": args.model, "device": jax.devices()[0].device_kind, "residency": args.residency}
        summary |= soak(engine, args.minutes, args.seed)
    finally:
        engine.close()
    text = json.dumps(summary, indent=1)
    if args.json:
        args.json.write_text(text)
    print(text)
    return 1 if summary["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
