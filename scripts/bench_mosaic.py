"""Check the decode kernels with Pallas's Mosaic GPU lowering against plain XLA, and time them against the Triton ones.

    python scripts/bench_mosaic.py --minutes 1 --out mosaic.json

Each program chains calls over weights of their own, more than the L2 cache holds; it is compiled in a thread and timed
with the threads at rest. What fails, a block shape or a whole kernel, is printed with its error and left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.backend import resolve
from pallas_kernels.fused_moe import gpu as triton_moe
from pallas_kernels.fused_moe import mosaic as mosaic_moe
from pallas_kernels.fused_moe.config import default_config
from pallas_kernels.fused_moe.reference import fused_moe
from pallas_kernels.fused_moe.swiglu import activate
from pallas_kernels.layout import swiglu_layout
from pallas_kernels.matvec import gpu as triton_matvec
from pallas_kernels.matvec import mosaic as mosaic_matvec
from scripts.bench_cache_kernels import Job
from scripts.bench_decode_kernels import draw, worst

BF16 = jnp.bfloat16
SHAPES = {"qkv": (5120, 2048), "wide": (4096, 2048), "o": (2048, 4096), "head": (32768, 2048)}
LAYOUT = swiglu_layout(hidden=2048, width=1536, dtype=BF16)
ACTIVE, SLOTS = 4, 60
hold = jax.lax.optimization_barrier


@dataclass(kw_only=True)
class Checked(Job):
    """A chain whose state ends with the result of its first call, to be compared with `expected`."""

    nbytes: int  # of weights, each call
    expected: Callable[[], Array]

    def attempt(self) -> Any:
        try:
            return self.compile()
        except Exception as error:  # whatever a compiler raises
            return error

    def row(self, compiled: Any) -> dict[str, Any]:
        try:
            if isinstance(compiled, Exception):
                raise compiled
            *_, first = compiled(self.state(), *self.inputs)
            difference = worst(first, self.expected(), 1e-2, "result")
            us = self.measure(compiled)
        except Exception as error:
            return self.labels | {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        return self.labels | {
            "us": round(us, 2),
            "GB/s": round(self.nbytes / us / 1e3),
            "difference": f"{difference:.0e}",
        }


def matvec_kernels(shape: str) -> dict[str, Callable[[Array, Array], Array]]:
    """Vector, matrix -> product, by name; each traced once."""
    configs = [
        mosaic_matvec.Config(rows=8),
        mosaic_matvec.Config(rows=4),
        mosaic_matvec.Config(rows=4, tiles=4),
        mosaic_matvec.Config(rows=8, tiles=2),
    ]
    if shape == "wide":
        configs += [
            mosaic_matvec.Config(rows=16),
            mosaic_matvec.Config(rows=8, tiles=4),
            mosaic_matvec.Config(rows=4, tiles=8),
        ]
        configs += [mosaic_matvec.Config(through="registers", rows=4), mosaic_matvec.Config(through="tensor map")]
    if shape == "head":
        configs += [mosaic_matvec.Config(rows=16), mosaic_matvec.Config(rows=8, tiles=4)]
    if shape == "pair":
        configs += [mosaic_matvec.Config(early=True, rows=8), mosaic_matvec.Config(early=True, rows=8, tiles=2)]
    kernels = {f"mosaic {describe(config)}": partial(mosaic_matvec.matvec, config=config) for config in configs}
    triton = {"triton": lambda x, w: triton_matvec.matvec(x[None], w).out[0]}
    return {name: jax.jit(kernel) for name, kernel in (triton | kernels).items()}


def describe(config: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in vars(config).items() if value is not False)


def matvec_jobs(shape: str, seed: int, layers: int) -> Iterator[Checked]:
    outputs, width = SHAPES[shape]
    w = [draw(seed + i, outputs, width, scale=width**-0.5) for i in range(4 if shape == "head" else layers)]

    def state() -> Any:
        return draw(seed, width), jnp.zeros(outputs, BF16)

    for name, kernel in matvec_kernels(shape).items():

        def program(state: Any, w: Any, kernel: Any = kernel) -> Any:
            x, first = state[0], None
            for matrix in w:
                y = kernel(x, matrix)
                first = y if first is None else first
                short = min(y.size, x.size)
                x = hold(x.at[:short].set(y[:short]))
            return x, first

        yield Checked(
            labels={"what": shape, "kernel": name}, program=program, state=state, inputs=(w,), calls=len(w),
            nbytes=2 * outputs * width, expected=partial(product, state, w[0]),
        )  # fmt: skip


@jax.jit
def _product(x: Array, w: Array) -> Array:
    return jnp.einsum("oi,i->o", w.astype(jnp.float32), x.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def product(state: Callable[[], Any], w: Array) -> Array:
    return _product(state()[0], w)


def pair_jobs(seed: int, layers: int) -> Iterator[Checked]:
    """Two shapes by turns, so that nothing stands between the kernels."""
    (outputs, width), there = SHAPES["wide"], range(layers // 2)
    up = [draw(seed + i, outputs, width, scale=width**-0.5) for i in there]
    down = [draw(seed + 100 + i, width, outputs, scale=outputs**-0.5) for i in there]

    def state() -> Any:
        return draw(seed, width), jnp.zeros(outputs, BF16)

    for name, kernel in matvec_kernels("pair").items():

        def program(state: Any, up: Any, down: Any, kernel: Any = kernel) -> Any:
            x, first = state[0], None
            for wide, narrow in zip(up, down, strict=True):
                y = kernel(x, wide)
                first = y if first is None else first
                x = kernel(y, narrow)
            return x, first

        yield Checked(
            labels={"what": "wide, o", "kernel": name}, program=program, state=state, inputs=(up, down),
            calls=2 * len(up), nbytes=2 * outputs * width, expected=partial(product, state, up[0]),
        )  # fmt: skip


def moe_jobs(seed: int, layers: int) -> Iterator[Checked]:
    """Each projection alone and both: of four experts in slots that differ from call to call."""
    hidden, width = LAYOUT.hidden, LAYOUT.width
    numbers = draw(seed, SLOTS, LAYOUT.block_elems, scale=hidden**-0.5)
    slots = jax.jit(partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16))(numbers)
    del numbers
    keys = jax.random.split(jax.random.key(seed), layers)
    ids = [jax.random.permutation(key, SLOTS)[:ACTIVE].astype(jnp.int32) for key in keys]
    weights = jax.nn.softmax(jax.random.normal(keys[0], (ACTIVE,)))
    x, h = draw(seed + 1, 1, hidden), draw(seed + 2, ACTIVE, width, scale=0.5)
    config = default_config(LAYOUT, ACTIVE)
    early = [mosaic_moe.Config(early=True, rows=4), mosaic_moe.Config(early=True, rows=8)]
    tried = {
        "up": [
            mosaic_moe.Config(rows=4),
            mosaic_moe.Config(rows=8),
            mosaic_moe.Config(rows=4, tiles=2),
            mosaic_moe.Config(rows=8, tiles=2),
            mosaic_moe.Config(rows=4, tiles=4),
        ],
        "down": [mosaic_moe.Config(rows=4), mosaic_moe.Config(rows=8), mosaic_moe.Config(rows=16)],
        "both": [mosaic_moe.Config(rows=4), mosaic_moe.Config(rows=8), *early],
    }
    up = {"triton": jax.jit(partial(triton_moe.project_up, layout=LAYOUT, config=config))}
    down = {"triton": jax.jit(partial(triton_moe.project_down, layout=LAYOUT, config=config), static_argnums=4)}
    for mosaic in dict.fromkeys(itertools.chain(*tried.values())):
        name = f"mosaic {describe(mosaic)}"
        up[name] = jax.jit(partial(mosaic_moe.project_up, layout=LAYOUT, config=mosaic))
        down[name] = jax.jit(partial(mosaic_moe.project_down, layout=LAYOUT, config=mosaic), static_argnums=4)

    def times_x(name: str) -> Array:
        matrix = LAYOUT.unpack(slots[ids[0]], name).astype(jnp.float32)
        return jnp.einsum("kfh,h->kf", matrix, x[0].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

    def expected_up() -> Array:
        return activate(times_x("gate"), times_x("up"), LAYOUT.activation)

    def expected_down() -> Array:
        matrix = LAYOUT.unpack(slots[ids[0]], "down").astype(jnp.float32)
        scaled = h.astype(jnp.float32) * weights[:, None]
        return jnp.einsum("khf,kf->h", matrix, scaled, precision=jax.lax.Precision.HIGHEST)[None]

    def expected_both() -> Array:
        return jax.jit(partial(fused_moe, layout=LAYOUT))(x, slots, ids[0][None], weights[None])

    def up_program(state: Any, slots: Array, ids: Any, weights: Array, kernel: Any) -> Any:
        x, first = state[0], None
        for some in ids:
            h = up[kernel](x, slots, some)
            first = h if first is None else first
            x = hold(x.at[:, :width].set(h[:1]))
        return x, first

    def down_program(state: Any, slots: Array, ids: Any, weights: Array, kernel: Any) -> Any:
        h, first = state[0], None
        for some in ids:
            y = down[kernel](h, slots, some, weights, 1)
            first = y if first is None else first
            h = hold(h.at[:1].set(y[:, :width].astype(h.dtype)))
        return h, first

    def both_program(state: Any, slots: Array, ids: Any, weights: Array, kernel: Any) -> Any:
        x, first = state[0], None
        for some in ids:
            y = down[kernel](up[kernel](x, slots, some), slots, some, weights, 1)
            first = y if first is None else first
            x = hold((x / 2 + y).astype(x.dtype))
        return x, first

    matrix = 2 * ACTIVE * hidden * width
    parts = {
        "up": (up_program, x, (ACTIVE, width), BF16, 2 * matrix, expected_up),
        "down": (down_program, h, (1, hidden), jnp.float32, matrix, expected_down),
        "both": (both_program, x, (1, hidden), jnp.float32, 3 * matrix, expected_both),
    }
    for what, (program, start, shape, dtype, nbytes, expected) in parts.items():
        names = ["triton", *(f"mosaic {describe(mosaic)}" for mosaic in tried[what])]
        for name in names:
            state = partial(lambda start, shape, dtype: (jnp.copy(start), jnp.zeros(shape, dtype)), start, shape, dtype)
            yield Checked(
                labels={"what": what, "kernel": name}, program=partial(program, kernel=name), state=state,
                inputs=(slots, ids, weights), calls=len(ids), nbytes=nbytes, expected=expected,
            )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--layers", type=int, default=24, help="calls chained in one jit")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the inputs")
    parser.add_argument("--minutes", type=float, default=60, help="stop after about this time and write what there is")
    parts: dict[str, Callable[[int, int], Iterator[Checked]]] = {
        "wide": partial(matvec_jobs, "wide"), "moe": moe_jobs, "pair": pair_jobs, "o": partial(matvec_jobs, "o"),
        "qkv": partial(matvec_jobs, "qkv"), "head": partial(matvec_jobs, "head"),
    }  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="what to time, in this order")
    parser.add_argument("--no-graphs", action="store_true", help="launch kernel by kernel, without CUDA graphs")
    args = parser.parse_args()
    if args.no_graphs:  # before the backend starts
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    if resolve(None) != "gpu":
        print(f"bench_mosaic: needs a GPU, JAX found {jax.default_backend()}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * args.minutes
    print(jax.devices()[0].device_kind, jax.__version__, "seed", args.seed, os.environ.get("XLA_FLAGS"), flush=True)
    rows: list[dict[str, Any]] = []
    for part in args.parts:
        begun = time.monotonic()
        if begun > deadline:
            print(f"{part}: out of time")
            continue
        try:
            jobs = list(parts[part](args.seed % 2**30, args.layers))
        except Exception as error:
            print(f"{part}: {type(error).__name__}: {error}"[:300], flush=True)
            continue
        with ThreadPoolExecutor(max(1, min(12, (os.cpu_count() or 2) - 3))) as pool:
            futures = [pool.submit(job.attempt) for job in jobs]
            wait(futures, timeout=max(0.0, deadline - time.monotonic()))
            pool.shutdown(cancel_futures=True)
        print(f"{part}: compiled in {time.monotonic() - begun:.0f} s", flush=True)
        for job, future in zip(jobs, futures, strict=True):
            row = job.labels | {"failed": "out of time"} if future.cancelled() else job.row(future.result())
            print(*row.values(), sep=" | ", flush=True)
            rows.append(row)
        if args.out:  # after every part: an interrupted run keeps what it has
            with open(args.out, "w") as file:
                json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
