"""What the benches of kernels share: jobs that are checked, then timed as a decode step uses a kernel.

A job is a program that chains calls over a donated state, as the layers of a step are chained. All are compiled in
threads; with the threads at rest each is checked against the reference and timed: programs follow each other without
a wait and keep their addresses, as decode steps do. A job that fails is a row of the table with the error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.backend import resolve
from pallas_kernels.layout import ExpertLayout, Field
from seqmoe_jax.bench.profile import read_profile

BF16 = np.dtype(jnp.bfloat16)


@dataclass(kw_only=True)
class Job:
    """A program to compile, check and time."""

    labels: dict[str, Any]
    program: Callable[..., Any]  # of a state and the inputs, to a state
    state: Callable[[], Any]  # makes one
    inputs: tuple[Any, ...] = ()
    calls: int  # chained in the program
    nbytes: int = 0  # that a call has to read: for the bandwidth
    flops: int = 0  # of a call
    profile: str | None = None  # kernels whose names begin so: their durations by the profiler, too
    check: Callable[[], float] | None = None  # the error, which it raises or returns, of one call

    def compile(self) -> Any:
        def chain(state: Any, *inputs: Any) -> Any:  # its name is the program's in profiles
            return self.program(state, *inputs)

        return jax.jit(chain, donate_argnums=0).lower(jax.eval_shape(self.state), *self.inputs).compile()

    def measure(self, compiled: Any, rounds: int, in_flight: int) -> dict[str, Any]:
        """Median and least microseconds per call, after one round that warms up."""
        row: dict[str, Any] = {} if self.check is None else {"error": float(f"{self.check():.1e}")}
        state, times = self.state(), []
        for round_ in range(rounds + 1):
            jax.block_until_ready(state)
            start = time.perf_counter()
            for _ in range(in_flight):
                state = compiled(state, *self.inputs)
            jax.block_until_ready(state)
            if round_:
                times.append((time.perf_counter() - start) / in_flight / self.calls * 1e6)
        us = statistics.median(times)
        row |= {"us": round(us, 2), "least_us": round(min(times), 2)}
        row |= {"GB/s": round(self.nbytes / us / 1e3)} if self.nbytes else {}
        row |= {"TFLOP/s": round(self.flops / us / 1e6, 1)} if self.flops else {}
        return row | ({"alone_us": self.durations(compiled, state)} if self.profile else {})

    def durations(self, compiled: Any, state: Any) -> dict[str, float]:
        """Median microseconds of each kernel as the profiler has them: without launches and what is between."""
        times: dict[str, list[float]] = defaultdict(list)
        with tempfile.TemporaryDirectory(prefix="seqmoe-profile-") as directory:
            with jax.profiler.trace(directory):
                for _ in range(3):
                    state = compiled(state, *self.inputs)
                jax.block_until_ready(state)
            for launch in read_profile(Path(directory), "jit_chain", {})[0]:
                if launch.kernel.startswith(str(self.profile)):
                    times[launch.kernel].append(launch.duration)
        return {name: round(statistics.median(each), 2) for name, each in times.items()}


def run_jobs(jobs: list[Job], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the table. What has not been compiled at the deadline is left out."""
    with ThreadPoolExecutor(max(1, min(12, (os.cpu_count() or 2) - 3))) as pool:
        futures = [pool.submit(job.compile) for job in jobs]
        wait(futures, timeout=max(0.0, args.deadline - time.monotonic()))
        pool.shutdown(cancel_futures=True)
    rows = []
    for job, future in zip(jobs, futures, strict=True):
        row = dict(job.labels)
        if future.cancelled() or time.monotonic() > args.deadline + 15:
            row["failed"] = "out of time"
        else:
            try:
                row |= job.measure(future.result(), args.rounds, args.in_flight)
            except Exception as error:  # a block shape that does not compile is a result
                row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
    return rows


def difference(got: Any, want: Any, tolerance: float) -> float:
    """The largest relative difference in norm of two equal trees; raises `AssertionError` beyond the tolerance."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-9))
    if not worst <= tolerance:
        raise AssertionError(f"differs by {worst:.1e} from the reference, at most {tolerance:.0e} is expected")
    return worst


def jitted(ways: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Each traced once, however often a program calls it."""
    return {label: jax.jit(call) for label, call in ways.items()}


def compare(
    call: Callable[..., Any], reference: Callable[..., Any], state: Callable[[], Any], *rest: Any, tolerance: float
) -> float:
    """`difference` of two functions of the state and the rest, both compiled."""
    got, want = (jax.jit(f)(state(), *rest) for f in (call, reference))
    return difference(got, want, tolerance)


def draw(seed: int, *shape: int, scale: float = 1.0, dtype: Any = BF16) -> Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def pinned(x: np.ndarray) -> Array:
    return jax.device_put(x, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


def random_experts(layout: ExpertLayout, count: int, seed: int) -> np.ndarray:
    """Blocks of random numbers of a size that keeps sums near one, `storage[count, n]`."""
    rng = np.random.default_rng(seed)

    def tensor(field: Field) -> np.ndarray:
        if field.dtype == np.uint8:  # FP4: exponents of 2**-8 to 2**-6, or two numbers
            low, high = (119, 122) if field.name.endswith("_scale") else (0, 256)
            return rng.integers(low, high, field.shape, np.uint8)
        if field.name.endswith("_scale"):
            return rng.uniform(0.005, 0.015, field.shape).astype(np.float32)
        spread = 3.0 if layout.scales and not field.name.endswith("_bias") else 0.03
        return (rng.standard_normal(field.shape, np.float32) * spread).astype(field.dtype)

    return np.stack([layout.pack({field.name: tensor(field) for field in layout.fields}) for _ in range(count)])


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    print(" | ".join(columns))
    for row in rows:
        print(" | ".join(str(row.get(column, "")) for column in columns), flush=True)


def parser(doc: str | None, parts: Iterable[str], shapes: Iterable[str]) -> argparse.ArgumentParser:
    """The options that all benches have."""
    parts, shapes = list(parts), list(shapes)
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", help="JSON file for the results, written after every part")
    options.add_argument("--parts", nargs="+", choices=parts, default=parts, help="what to check and time")
    options.add_argument("--shapes", nargs="+", choices=shapes, default=[name for name in shapes if name != "tiny"])
    options.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    options.add_argument("--layers", type=int, default=24, help="calls chained in one jit")
    options.add_argument("--minutes", type=float, default=60, help="leave out what is not compiled after this time")
    options.add_argument("--rounds", type=int, default=15, help="of which the median is taken")
    options.add_argument("--in-flight", type=int, default=6, help="programs dispatched before one is waited for")
    options.add_argument("--sweep", action="store_true", help="also other block shapes")
    options.add_argument("--interpret", action="store_true", help="run kernels in the interpreter: for tests")
    return options


def run(
    options: argparse.ArgumentParser,
    parts: Mapping[str, Callable[[argparse.Namespace], Iterator[Job]]],
    argv: list[str] | None = None,
) -> int:
    """Checks and times the parts asked for; 1 if a check failed, 2 without a GPU."""
    args = options.parse_args(argv)
    if resolve(None) != "gpu" and not args.interpret:
        print(f"needs a GPU, JAX found {jax.default_backend()}", file=sys.stderr)
        return 2
    args.deadline = time.monotonic() + 60 * args.minutes
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "settings": vars(args)}
    failed = False
    for name in args.parts:
        report[name] = run_jobs(list(parts[name](args)), args)
        failed |= any(str(row.get("failed")).startswith("AssertionError") for row in report[name])
        print_table(report[name])
        if args.out:
            with open(args.out, "w") as file:
                json.dump(report, file, indent=1)
    return int(failed)
