"""Check decode kernels with Pallas's Mosaic GPU lowering against plain XLA, and time them beside the Triton ones.

    python scripts/bench_mosaic.py --minutes 1 --out mosaic.json

Each program chains calls over weights of their own, more than the L2 cache holds; it is compiled in a thread and timed
with the threads at rest. What fails is printed with its error and left out.
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
MATRICES = {  # [O, I], taken by turns
    "4096x2048": [(4096, 2048)],
    "4096x2048, 2048x4096": [(4096, 2048), (2048, 4096)],
    "2048x4096": [(2048, 4096)],
    "5120x2048": [(5120, 2048)],
    "32768x2048": [(32768, 2048)],
}
LAYOUT = swiglu_layout(hidden=2048, width=1536, dtype=BF16)
ACTIVE, SLOTS = 4, 60
ROWS = (4, 8)  # of a Mosaic program
MOST_ELEMENTS = 1 << 28  # of the matrices of one chain
hold = jax.lax.optimization_barrier
exact = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


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
        speed = {"us": round(us, 2), "GB/s": round(self.nbytes / us / 1e3)}
        return self.labels | speed | {"difference": f"{difference:.0e}"}


def matvec_jobs(name: str, seed: int, layers: int) -> Iterator[Checked]:
    shapes = MATRICES[name]
    elements = shapes[0][0] * shapes[0][1]
    layers = min(layers, MOST_ELEMENTS // elements) // len(shapes) * len(shapes)
    w = [
        draw(seed + i, *shape, scale=shape[1] ** -0.5)
        for i, shape in enumerate(itertools.islice(itertools.cycle(shapes), layers))
    ]
    kernels: dict[str, Callable[[Array, Array], Array]] = {
        "triton": jax.jit(lambda x, w: triton_matvec.matvec(x[None], w).out[0])
    }
    for rows in ROWS:
        kernels[f"mosaic, {rows} rows"] = jax.jit(partial(mosaic_matvec.matvec, rows=rows))

    def state() -> Any:
        return draw(seed, shapes[0][1]), jnp.zeros(shapes[0][0], BF16)

    def expected() -> Array:
        return exact("oi,i->o", w[0].astype(jnp.float32), state()[0].astype(jnp.float32))

    def program(state: Any, w: Any, kernel: Any) -> Any:
        x, first = state[0], None
        for matrix in w:
            y = kernel(x, matrix)
            first = y if first is None else first
            # Where the result fits the next matrix nothing stands between the kernels.
            x = y if len(shapes) > 1 else hold(x.at[: y.size].set(y[: x.size]))
        return x, first

    for label, kernel in kernels.items():
        yield Checked(
            labels={"what": name, "kernel": label}, program=partial(program, kernel=kernel), state=state, inputs=(w,),
            calls=len(w), nbytes=2 * elements, expected=expected,
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

    triton = default_config(LAYOUT, ACTIVE)
    up = {"triton": jax.jit(partial(triton_moe.project_up, layout=LAYOUT, config=triton))}
    down = {"triton": jax.jit(partial(triton_moe.project_down, layout=LAYOUT, config=triton), static_argnums=4)}
    for rows in ROWS:
        label = f"mosaic, {rows} rows"
        up[label] = jax.jit(partial(mosaic_moe.project_up, layout=LAYOUT, rows=rows))
        down[label] = jax.jit(partial(mosaic_moe.project_down, layout=LAYOUT, rows=rows), static_argnums=4)

    def matrix(name: str) -> Array:
        return LAYOUT.unpack(slots[ids[0]], name).astype(jnp.float32)

    def expected_up() -> Array:
        gate, linear = (exact("kfh,h->kf", matrix(name), x[0].astype(jnp.float32)) for name in ("gate", "up"))
        return activate(gate, linear, LAYOUT.activation)

    def expected_down() -> Array:
        return exact("khf,kf->h", matrix("down"), h.astype(jnp.float32) * weights[:, None])[None]

    def expected_both() -> Array:
        return jax.jit(partial(fused_moe, layout=LAYOUT))(x, slots, ids[0][None], weights[None])

    def up_step(x: Array, slots: Array, some: Array, weights: Array, kernel: str) -> tuple[Array, Array]:
        h = up[kernel](x, slots, some)
        return h, x.at[:, :width].set(h[:1])

    def down_step(h: Array, slots: Array, some: Array, weights: Array, kernel: str) -> tuple[Array, Array]:
        y = down[kernel](h, slots, some, weights, 1)
        return y, h.at[:1].set(y[:, :width].astype(h.dtype))

    def both_step(x: Array, slots: Array, some: Array, weights: Array, kernel: str) -> tuple[Array, Array]:
        y = down[kernel](up[kernel](x, slots, some), slots, some, weights, 1)
        return y, (x / 2 + y).astype(x.dtype)

    def program(state: Any, slots: Array, ids: Any, weights: Array, step: Any, kernel: str) -> Any:
        x, first = state[0], None
        for some in ids:
            y, x = step(x, slots, some, weights, kernel)
            first = y if first is None else first
            x = hold(x)
        return x, first

    nbytes = 2 * ACTIVE * hidden * width
    parts = {
        "up": (up_step, x, jax.ShapeDtypeStruct((ACTIVE, width), BF16), 2 * nbytes, expected_up),
        "down": (down_step, h, jax.ShapeDtypeStruct((1, hidden), jnp.float32), nbytes, expected_down),
        "up and down": (both_step, x, jax.ShapeDtypeStruct((1, hidden), jnp.float32), 3 * nbytes, expected_both),
    }

    def state(start: Array, result: Any) -> Any:
        return jnp.copy(start), jnp.zeros(result.shape, result.dtype)

    for (what, (step, start, result, size, expected)), kernel in itertools.product(parts.items(), up):
        yield Checked(
            labels={"what": what, "kernel": kernel}, program=partial(program, step=step, kernel=kernel),
            state=partial(state, start, result), inputs=(slots, ids, weights), calls=len(ids), nbytes=size,
            expected=expected,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--layers", type=int, default=24, help="calls chained in one jit")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the inputs")
    parser.add_argument("--minutes", type=float, default=60, help="stop after about this time and write what there is")
    args = parser.parse_args()
    if resolve(None) != "gpu":
        print(f"bench_mosaic: needs a GPU, JAX found {jax.default_backend()}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * args.minutes
    print(jax.devices()[0].device_kind, jax.__version__, "seed", args.seed, flush=True)
    rows: list[dict[str, Any]] = []
    parts: list[Callable[[int, int], Iterator[Checked]]] = [partial(matvec_jobs, name) for name in MATRICES]
    for part in [*parts, moe_jobs]:
        if time.monotonic() > deadline:
            print("out of time")
            break
        jobs = list(part(args.seed % 2**30, args.layers))
        with ThreadPoolExecutor(max(1, min(12, (os.cpu_count() or 2) - 3))) as pool:
            futures = [pool.submit(job.attempt) for job in jobs]
            wait(futures, timeout=max(0.0, deadline - time.monotonic()))
            pool.shutdown(cancel_futures=True)
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
