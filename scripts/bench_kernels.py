"""Times the decode MoE kernels on this machine's GPU: microseconds per MoE layer and TB/s of expert weights.

The default block shapes, at every shape and batch; a sweep over block shapes; what each part costs:

    python scripts/bench_kernels.py --out kernels.json [--shapes NAME ...] [--batches N ...] [--prefill]
    python scripts/bench_kernels.py --sweep --breakdown --minutes 2.5 --out sweep.json

Every configuration is first checked against the reference with fresh random inputs. Timed are many calls chained
in one jitted computation over different slots of an array far larger than the L2 cache, so that weights come from
memory. Computations follow each other without a wait and keep their addresses, as decode steps do. Between two
calls stands a conversion of the result to the dtype of the input, a launch of its own that models do not have.
Programs are compiled in threads, timed one by one; after `--minutes` what has been measured is written and the
rest is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.fused_moe import Config, fused_moe, gpu
from pallas_kernels.fused_moe.config import Fp8Mode, default_config
from pallas_kernels.fused_moe.swiglu import activate, hidden_dtype, unpack_weight
from pallas_kernels.grouped_moe import Config as GroupedConfig
from pallas_kernels.grouped_moe import assign_blocks, grouped_moe
from pallas_kernels.grouped_moe.config import default_config as default_grouped_config
from pallas_kernels.layout import FP4, FP8, Activation, ExpertLayout, Field, swiglu_layout
from seqmoe_jax.bench.profile import read_profile

BF16 = np.dtype(ml_dtypes.bfloat16)
# K, H, F, dtype of the experts.
SHAPES: dict[str, tuple[int, int, int, np.dtype]] = {
    "peer": (4, 2048, 1536, BF16),
    "qwen3-30b-fp8": (8, 2048, 768, FP8),
    "demo": (4, 256, 64, BF16),
    "gpt-oss": (4, 2880, 2880, BF16),
    "gpt-oss-mxfp4": (4, 2880, 2880, FP4),
}
CALLS = 12  # chained in one computation, as the layers of a model are; compiling takes as long as there are calls
IN_FLIGHT = 8  # computations dispatched before one is waited for
TOLERANCE = 4e-3  # relative norm; bf16 rounding of hidden values that fall the other way


def layout_of(name: str) -> ExpertLayout:
    """Of a shape's experts; those in FP4 are GPT-OSS's, with biases and an activation of their own."""
    _, hidden, width, dtype = SHAPES[name]
    if dtype == FP4:
        activation = Activation(limit=7.0, slope=1.702, shift=1.0)
        return swiglu_layout(hidden=hidden, width=width, dtype=dtype, activation=activation, bias=BF16)
    return swiglu_layout(hidden=hidden, width=width, dtype=dtype)


def random_slots(layout: ExpertLayout, count: int, seed: int) -> jax.Array:
    """`storage[S, n]` made on the device: a few different experts, repeated over the slots."""
    rng = np.random.default_rng(seed)

    def tensor(field: Field) -> np.ndarray:
        if field.dtype == np.uint8:  # FP4: exponents of 2**-8 to 2**-6, or two numbers
            low, high = (119, 122) if field.name.endswith("_scale") else (0, 256)
            return rng.integers(low, high, field.shape, np.uint8)
        if field.name.endswith("_scale"):
            return rng.uniform(0.005, 0.015, field.shape).astype(np.float32)
        spread = 3.0 if field.dtype == FP8 else 0.03
        return (rng.standard_normal(field.shape, np.float32) * spread).astype(field.dtype)

    experts = [layout.pack({f.name: tensor(f) for f in layout.fields}) for _ in range(min(count, 4))]
    some = jnp.asarray(np.stack(experts))
    # One output of the full size, no second copy of it.
    return jax.jit(lambda some: some[jnp.arange(count) % some.shape[0]])(some)


def slot_count(layout: ExpertLayout, gigabytes: float) -> int:
    """Slots to fill the given size; one-byte storage skips sizes that the kernels refuse."""
    count = int(gigabytes * 1e9 // layout.block_bytes) + 1
    if layout.storage.itemsize == 1 and 2**31 < count * layout.block_bytes <= 2**32:
        count = 2**32 // layout.block_bytes + 1
    return count


def relative_error(got: jax.Array, want: jax.Array) -> float:
    return float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want))


@dataclass(kw_only=True)
class Case:
    """One shape and batch: what the calls read, and what a call should give."""

    name: str
    batch: int
    gigabytes: float

    def __post_init__(self) -> None:
        self.per_token, self.hidden, self.width, _ = SHAPES[self.name]
        self.layout = layout_of(self.name)
        self.slots = random_slots(self.layout, slot_count(self.layout, self.gigabytes), seed=self.batch)
        rng = np.random.default_rng(time.time_ns())
        shape, routes = (CALLS, self.batch, self.per_token), CALLS * self.batch * self.per_token
        chosen = rng.choice(self.slots.shape[0], routes, replace=routes > self.slots.shape[0])
        # An array for every layer: slicing one would be a launch.
        self.ids = tuple(jnp.asarray(chosen.reshape(shape), jnp.int32))
        self.weights = jnp.asarray(rng.uniform(0.1, 1, shape[1:]), jnp.float32)
        self.x = jnp.asarray(rng.standard_normal((self.batch, self.hidden)), jnp.bfloat16)
        routes_h = (self.batch * self.per_token, self.width)
        self.h = jnp.asarray(rng.standard_normal(routes_h), hidden_dtype(self.x))
        self.want = references(self)

    def nbytes(self, *names: str) -> int:
        """What the matrices of these names have, with all that goes with them, in the experts of all routes."""
        fields = [field for field in self.layout.fields if field.name.split("_")[0] in names]
        return self.batch * self.per_token * sum(field.nbytes for field in fields)

    @property
    def row(self) -> dict[str, Any]:
        return {"kernel": "fused_moe", "shape": self.name, "batch": self.batch, "slots": self.slots.shape[0]}

    def shared(self, config: Config) -> Job:
        """Every token of the batch with the experts of the first."""
        job = self.all(config)
        job.ids = tuple(jnp.broadcast_to(layer[:1], layer.shape) for layer in self.ids)
        job.part, job.nbytes = "all, shared experts", job.nbytes // self.batch
        return job

    def all(self, config: Config | None = None, implementation: Any = "gpu") -> Job:
        call = jax.jit(partial(fused_moe, layout=self.layout, implementation=implementation, config=config))

        def chain(x: jax.Array, slots: jax.Array, ids: Any, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
            ys = []
            for layer in ids:
                ys.append(call(x, slots, layer, weights))
                x = ys[-1].astype(x.dtype)
            return x, ys[0]

        return Job(
            case=self, part="all", config=config, chain=chain, start=self.x, nbytes=self.nbytes("gate", "up", "down")
        )

    def up(self, config: Config) -> Job:
        call = jax.jit(partial(gpu.project_up, layout=self.layout, config=config))

        def chain(x: jax.Array, slots: jax.Array, ids: Any, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
            hs = []
            for layer in ids:
                hs.append(call(x, slots, layer.reshape(-1)))
                x = x + hs[-1][:1, :1].astype(x.dtype)
            return x, hs[0]

        return Job(case=self, part="up", config=config, chain=chain, start=self.x, nbytes=self.nbytes("gate", "up"))

    def down(self, config: Config) -> Job:
        call = jax.jit(partial(gpu.project_down, batch=self.batch, layout=self.layout, config=config))

        def chain(h: jax.Array, slots: jax.Array, ids: Any, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
            ys = []
            for layer in ids:
                ys.append(call(h, slots, layer.reshape(-1), weights.reshape(-1)))
                h = h + ys[-1][:1, :1].astype(h.dtype)
            return h, ys[0]

        return Job(case=self, part="down", config=config, chain=chain, start=self.h, nbytes=self.nbytes("down"))

    def pairs(self, count: int) -> Job:
        """As `all`, with `count` pairs of a kernel that does nothing and a conversion in place of the layer."""

        def nothing(x_ref: Any, y_ref: Any) -> None:
            y_ref[0, 0] = x_ref[0, 0].astype(y_ref.dtype)

        def call(x: jax.Array, dtype: Any) -> jax.Array:
            params = plgpu.CompilerParams(num_warps=1, num_stages=1)
            return pl.pallas_call(nothing, jax.ShapeDtypeStruct(x.shape, dtype), compiler_params=params)(x)

        def chain(x: jax.Array, slots: jax.Array, ids: Any, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = x.astype(jnp.float32)
            for _ in ids:
                for _ in range(count):
                    y = call(x, jnp.float32)
                    x = y.astype(x.dtype)
            return x, y

        return Job(case=self, part=f"{count} pairs", config=None, chain=chain, start=self.x, nbytes=0)


@dataclass(kw_only=True)
class Job:
    """A chain of calls to compile, check and time."""

    case: Case
    part: str
    config: Config | None
    chain: Callable[..., tuple[jax.Array, jax.Array]]
    start: jax.Array
    nbytes: int  # of expert weights that the calls need, each
    profiled: bool = False  # also say how long each kernel takes by itself

    def __post_init__(self) -> None:
        self.ids = self.case.ids

    def compile(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        case = self.case
        jitted = jax.jit(self.chain, donate_argnums=0)  # the state of the chain stays at its address
        return jitted.lower(self.start, case.slots, self.ids, case.weights).compile()

    def measure(self, compiled: Any, want: jax.Array | None, repeats: int) -> dict[str, Any]:
        case = self.case
        config = None if self.config is None else dataclasses.asdict(self.config)
        row = case.row | {"part": self.part, "config": config}
        rest = case.slots, self.ids, case.weights
        state, first = compiled(jnp.copy(self.start), *rest)
        if want is not None:
            row["error"] = relative_error(first, want)
            if not row["error"] < TOLERANCE:
                return row | {"failed": f"relative error {row['error']:.1e}"}
        times = []
        for _ in range(repeats):
            jax.block_until_ready(state)
            start = time.perf_counter()
            for _ in range(IN_FLIGHT):
                state, first = compiled(state, *rest)
            jax.block_until_ready(state)
            times.append((time.perf_counter() - start) / IN_FLIGHT / CALLS * 1e6)
        us = statistics.median(times)
        row |= {"us": us, "least_us": min(times), "tb_per_s": self.nbytes / us / 1e6}
        if self.profiled:
            row["kernels_us"] = kernel_times(compiled, state, rest)
            row["kernels_tb_per_s"] = self.nbytes / sum(row["kernels_us"].values()) / 1e6
        return row


def kernel_times(compiled: Any, state: jax.Array, rest: tuple[Any, ...]) -> dict[str, float]:
    """Microseconds of each of our kernels as the profiler has them, medians: without launches and what is between."""
    with tempfile.TemporaryDirectory(prefix="seqmoe-profile-") as directory:
        with jax.profiler.trace(directory):
            for _ in range(3):
                state, _ = compiled(state, *rest)
            jax.block_until_ready(state)
        launches, _ = read_profile(Path(directory), "jit_chain", {})
    times: dict[str, list[float]] = defaultdict(list)
    for launch in launches:
        if launch.kernel.startswith("fused_moe"):
            times[launch.kernel].append(launch.duration)
    return {name: statistics.median(each) for name, each in times.items()}


def references(case: Case) -> dict[str, jax.Array]:
    """What the first call of each kind of chain should give; XLA's arithmetic."""
    layout, ids = case.layout, case.ids[0]

    @jax.jit
    def up_and_down(x: jax.Array, h: jax.Array, slots: jax.Array) -> dict[str, jax.Array]:
        def product(name: str, slot: jax.Array, rows: jax.Array) -> jax.Array:
            weight = unpack_weight(slots[slot], layout, name)
            y = jnp.einsum("c,rc->r", rows.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
            return y + layout.unpack(slots[slot], f"{name}_bias").astype(jnp.float32) if layout.biased else y

        def one(route: jax.Array) -> tuple[jax.Array, jax.Array]:
            slot = ids.reshape(-1)[route]
            token = x[route // case.per_token]
            up = activate(product("gate", slot, token), product("up", slot, token), layout.activation)
            return up, product("down", slot, h[route])

        up, down = jax.lax.map(one, jnp.arange(ids.size))
        weighted = down.reshape(*ids.shape, -1) * case.weights[..., None]
        return {"up": up, "down": weighted.sum(axis=1)}

    reference = jax.jit(partial(fused_moe, layout=layout, implementation="xla"))
    return {"all": reference(case.x, case.slots, ids, case.weights), **up_and_down(case.x, case.h, case.slots)}


def per_thread(rows: int, elements: int, matrices: int, layout: ExpertLayout, warps: int) -> float:
    """Bytes of weights that a thread of a program has in flight."""
    itemsize = 0.5 if layout.dtype == FP4 else layout.dtype.itemsize
    return rows * elements * matrices * itemsize / (32 * warps)


def pieces(length: int) -> list[int]:
    """Powers of two into which a row of `length` goes with at most an eighth of padding."""
    return [size for size in (256, 512, 1024, 2048) if -(-length // size) * size - length <= length // 8]


def candidates(case: Case) -> Iterator[tuple[str, Config]]:
    """(part, configuration) of each projection by itself, threads asking for about 60 to 500 bytes of weights."""
    layout, base = case.layout, default_config(case.layout, case.per_token)
    modes: list[Fp8Mode] = ["convert", "bits"] if layout.dtype == FP8 else [base.fp8]
    for rows, cols, warps, mode in itertools.product((1, 2, 4, 8), pieces(case.hidden), (1, 2, 4), modes):
        if 60 <= per_thread(rows, case.hidden, 2, layout, warps) <= 512:
            yield "up", dataclasses.replace(base, up_rows=rows, up_cols=cols, up_warps=warps, fp8=mode)
    routes = pl.next_power_of_2(case.per_token)
    for rows, cols, warps, mode in itertools.product((1, 2, 4, 8, 16), pieces(case.width)[:2], (1, 2, 4, 8), modes):
        if 60 <= per_thread(rows, case.width * routes, 1, layout, warps) <= 512:
            yield "down", dataclasses.replace(base, down_rows=rows, down_cols=cols, down_warps=warps, fp8=mode)


class Deadline:
    """A moment after which nothing more is begun."""

    def __init__(self, minutes: float | None):
        self.end = time.monotonic() + 60 * minutes if minutes else float("inf")

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def share(self, count: int) -> Deadline:
        """The moment at which one of `count` equal parts of the time left is over."""
        part = Deadline(None)
        part.end = time.monotonic() + max(0.0, self.left) / count
        return part


def run_jobs(jobs: list[Job], want: dict[str, jax.Array], *, repeats: int, deadline: Deadline) -> list[dict[str, Any]]:
    """Compiles in threads, then times one program after the other with the threads at rest."""
    threads = max(1, min(12, (os.cpu_count() or 2) - 3))
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(job.compile) for job in jobs]
        # What is being compiled when the time is over is waited for: it would disturb the clock.
        wait(futures, timeout=None if deadline.left == float("inf") else max(0.0, deadline.left - 0.06 * len(jobs)))
        pool.shutdown(cancel_futures=True)
    results = []
    for job, future in zip(jobs, futures, strict=True):
        if future.cancelled():
            continue
        try:
            results.append(job.measure(future.result(), want.get(job.part), repeats))
        except Exception as problem:  # a shape that does not compile is a result of the sweep
            failed = f"{type(problem).__name__}: {str(problem)[:200]}"
            config = None if job.config is None else dataclasses.asdict(job.config)
            results.append(job.case.row | {"part": job.part, "config": config, "failed": failed})
    if left_out := len(jobs) - len(results):
        print(f"  out of time: {left_out} of {len(jobs)} left out", flush=True)
    return results


def best(results: list[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    """Of one part, the fastest first."""
    return sorted((r for r in results if r["part"] == part and "us" in r and r["config"]), key=lambda r: r["us"])


def report(results: list[dict[str, Any]], top: int = 6) -> list[dict[str, Any]]:
    """Prints failures, what has no configuration, and the best of each kind."""
    for result in results:
        if "failed" in result or result["config"] is None:
            print(describe(result), flush=True)
    for part in ("up", "down", "all"):
        for result in best(results, part)[:top]:
            print("  best:", describe(result), flush=True)
    return results


def shuffled(jobs: list[Job]) -> list[Job]:
    """So that what the deadline leaves out is not all of a kind."""
    return random.Random(0).sample(jobs, len(jobs))


def sweep(case: Case, *, repeats: int, deadline: Deadline) -> list[dict[str, Any]]:
    """Each projection by itself; then whole layers of the best pairs of the two."""
    makers = {"up": case.up, "down": case.down}
    jobs = [makers[part](config) for part, config in candidates(case) if part in makers]
    results = run_jobs(shuffled(jobs), case.want, repeats=repeats, deadline=deadline)
    pairs = []
    for up, down in itertools.product(best(results, "up")[:2], best(results, "down")[:3]):
        fields = {k: v for k, v in up["config"].items() if k.startswith("up_")}
        fields |= {k: v for k, v in down["config"].items() if k.startswith("down_")}
        pairs.append(Config(fp8=up["config"]["fp8"], **fields))
    jobs = [case.all(config) for config in dict.fromkeys(pairs)]
    return report(results + run_jobs(jobs, case.want, repeats=repeats, deadline=deadline))


def breakdown(case: Case, *, repeats: int, deadline: Deadline) -> list[dict[str, Any]]:
    """What the default's parts cost alone; what launches that do nothing cost, and a program beside its calls."""
    config = default_config(case.layout, case.per_token)
    jobs = [case.pairs(1), case.pairs(4), case.up(config), case.down(config), case.all(config)]
    results = run_jobs(jobs, case.want, repeats=repeats, deadline=deadline)
    print(*map(describe, results), sep="\n", flush=True)
    return results


def defaults(case: Case, *, repeats: int, deadline: Deadline) -> list[dict[str, Any]]:
    """The default configuration, and plain XLA."""
    config = default_config(case.layout, case.per_token)
    jobs = [case.all(None, "xla"), case.all(config)]
    if case.batch > 1:
        jobs.append(case.shared(config))
    for job in jobs:
        job.profiled = job.config is not None
    results = run_jobs(jobs, case.want, repeats=repeats, deadline=deadline)
    print(*map(describe, results), sep="\n", flush=True)
    return results


def grouped_configs(layout: ExpertLayout) -> Iterator[GroupedConfig]:
    base = default_grouped_config(layout)
    yield base
    depths = (128,) if layout.storage == np.uint8 else (32, 64, 128)
    for cols in (32, 64, 128):
        for depth in depths:
            for warps in (4, 8):
                config = dataclasses.replace(base, up_cols=cols, down_cols=cols, depth=depth, warps=warps)
                if config != base:
                    yield config


def bench_prefill(
    name: str, *, tokens: int, rows: int, experts: int, repeats: int, sweep: bool
) -> Iterator[dict[str, Any]]:
    per_token, hidden, width, _ = SHAPES[name]
    layout = layout_of(name)
    slots = random_slots(layout, experts, seed=tokens)
    rng = np.random.default_rng(time.time_ns())
    ids = jnp.asarray(np.stack([rng.permutation(experts)[:per_token] for _ in range(tokens)]), jnp.int32)
    block_slots, block_rows, _ = assign_blocks(ids, num_experts=experts, rows=rows)
    x = jnp.asarray(rng.standard_normal((tokens, hidden)), jnp.bfloat16)
    fresh = jax.jit(lambda: jnp.zeros((*block_rows.shape, hidden), jnp.float32))
    used = block_slots[:, None, None] >= 0
    want = grouped_moe(fresh(), x, slots, block_slots, block_rows, layout=layout, implementation="xla")
    row = {"kernel": "grouped_moe", "shape": name, "tokens": tokens, "rows": rows, "blocks": int(used.sum())}
    for index, config in enumerate(grouped_configs(layout)):
        if index and not sweep:
            return
        label = {"config": dataclasses.asdict(config), "default": index == 0}
        call = jax.jit(partial(grouped_moe, layout=layout, implementation="gpu", config=config), donate_argnums=0)
        try:
            out = call(fresh(), x, slots, block_slots, block_rows)
            error = relative_error(jnp.where(used, out, 0), jnp.where(used, want, 0))
            if not error < TOLERANCE:
                yield row | label | {"failed": f"relative error {error:.1e}"}
                continue
            times = []
            for skipped in (block_slots, jnp.full_like(block_slots, -1)):
                samples = []
                for _ in range(repeats):
                    start = time.perf_counter()
                    out = jax.block_until_ready(call(out, x, slots, skipped, block_rows))
                    samples.append(time.perf_counter() - start)
                times.append(statistics.median(samples) * 1e6)
        except Exception as problem:
            yield row | label | {"failed": f"{type(problem).__name__}: {str(problem)[:200]}"}
            continue
        flops = 2 * 3 * tokens * per_token * hidden * width
        yield (
            row
            | label
            | {
                "us": times[0],
                "us_all_skipped": times[1],
                "tflop_per_s": flops / times[0] / 1e6,
                "error": error,
            }
        )


def describe(result: dict[str, Any]) -> str:
    """One line of the table."""
    config = result["config"]
    if isinstance(config, dict):
        config = " ".join(f"{key}={value}" for key, value in config.items())
    where = f"{result['kernel']:11} {result['shape']:13} " + " ".join(
        f"{key}={result[key]}" for key in ("batch", "tokens", "rows", "part") if key in result
    )
    if "failed" in result:
        return f"{where:46} FAILED {result['failed'][:60]}  {config}"
    rate = f"{result['tb_per_s']:5.2f} TB/s" if "tb_per_s" in result else f"{result['tflop_per_s']:6.1f} TFLOP/s"
    alone = ""
    if "kernels_us" in result:
        each = " + ".join(f"{us:.2f}" for us in result["kernels_us"].values())
        alone = f" (kernels alone {each} us, {result['kernels_tb_per_s']:.2f} TB/s)"
    return f"{where:46} {result['us']:7.2f} us {rate}{alone}  {config}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all results as JSON")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--gigabytes", type=float, default=2.1, help="size of the slot array")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--minutes", type=float, help="stop after this time and write what there is")
    parser.add_argument("--sweep", action="store_true", help="also other block shapes")
    parser.add_argument("--breakdown", action="store_true", help="what each part costs alone")
    parser.add_argument("--prefill", action="store_true", help="also the prefill kernel, over its block shapes")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"bench_kernels: needs a GPU, JAX found {jax.default_backend()}", file=sys.stderr)
        return 2
    deadline = Deadline(args.minutes)
    results: list[dict[str, Any]] = []

    def keep(new: Iterable[dict[str, Any]]) -> None:
        results.extend(new)
        if args.out:  # after every part: an interrupted run keeps what it has
            device = jax.devices()[0].device_kind
            args.out.write_text(json.dumps({"device": device, "jax": jax.__version__, "results": results}, indent=1))

    parts = [defaults] + [breakdown] * args.breakdown + [sweep] * args.sweep
    named = [(name, batch) for name in args.shapes for batch in args.batches]
    cases = [Case(name=name, batch=batch, gigabytes=args.gigabytes) for name, batch in named]
    rounds = [(part, case) for part in parts for case in cases]
    for index, (part, case) in enumerate(rounds):
        if deadline.left > 0:
            # Sweeps share what the others leave.
            count = len(rounds) - index if part is sweep else 1
            keep(part(case, repeats=args.repeats, deadline=deadline.share(count)))
    if args.prefill:
        for name in args.shapes:
            for tokens, rows in ((128, 16), (2048, 64)):
                if deadline.left > 0:
                    keep(
                        bench_prefill(
                            name, tokens=tokens, rows=rows, experts=64, repeats=args.repeats, sweep=args.sweep
                        )
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
