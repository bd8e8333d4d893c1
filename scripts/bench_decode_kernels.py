"""Check the kernels around a decode step's experts against plain XLA on a GPU, and time both as a step uses them.

    python scripts/bench_decode_kernels.py --minutes 2 --out decode_kernels.json [--sweep]

Each program chains the layers of a step, every one with weights and a cache of its own; it is compiled in a thread and
timed with the threads at rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels import decode_attention as attention
from pallas_kernels import matvec as projection
from pallas_kernels.backend import resolve
from pallas_kernels.decode_attention.gpu import decode_attention
from pallas_kernels.matvec.config import default_config
from pallas_kernels.matvec.gpu import matvec
from scripts.bench_cache_kernels import Job, print_table, run_jobs
from seqmoe_jax.models import fused
from seqmoe_jax.models.fused import DecodeKernels, heads_of
from seqmoe_jax.models.layers import linear
from seqmoe_jax.models.mixers.gqa import GQA, KV, GQAWeights
from seqmoe_jax.models.norms import RMSNorm
from seqmoe_jax.models.rope import Rope
from seqmoe_jax.models.routers import RouterSpec, RouterWeights
from seqmoe_jax.models.spec import LayerSpec, MoESpec
from seqmoe_jax.models.weights import LayerWeights, MoEWeights

HIDDEN, VOCAB, BF16 = 2048, 151_936, jnp.bfloat16
NORM = RMSNorm(eps=1e-6)
ROPE = Rope(theta=1e6, rotary_dim=128)
PEER = GQA(num_heads=32, num_kv_heads=4, head_dim=128, rope=ROPE, scale=128**-0.5, norm=NORM, qk_norm="head")
OSS = GQA(
    num_heads=64, num_kv_heads=8, head_dim=64, rope=Rope(theta=1e6, rotary_dim=64), scale=0.125, norm=NORM, sinks=True
)
ROUTER = RouterSpec(num_experts=128, top_k=8, normalize=True)
XLA, ALL = DecodeKernels(), DecodeKernels.of("gpu")
PARTS = {  # what a half of a layer is computed by
    "xla": XLA,
    "attention": DecodeKernels(attention="gpu"),
    "attention, projection": ALL,
}


PARTS_TIMED = ("mix", "route", "matvec", "attention")


def draw(key: int, *shape: int, scale: float = 1.0, dtype: Any = BF16) -> Array:
    return (scale * jax.random.normal(jax.random.key(key), shape)).astype(dtype)


def layer_of(mixer: GQA) -> LayerSpec:
    return LayerSpec(norm=NORM, mixer=mixer, mlp=MoESpec(router=ROUTER, width=768))


def weights_of(mixer: GQA, key: int, dtype: Any = BF16) -> LayerWeights:
    """Weights of one layer without its experts, of a size that keeps activations near one."""
    n, g, d = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    one = partial(draw, dtype=dtype)
    attend = GQAWeights(
        qkv=one(key, (n + 2 * g) * d, HIDDEN, scale=HIDDEN**-0.5), o=one(key + 1, HIDDEN, n * d, scale=(n * d) ** -0.5),
        qkv_bias=None, o_bias=None, sinks=one(key + 2, n) if mixer.sinks else None,
        q_norm=1 + one(key + 3, d, scale=0.1) if mixer.qk_norm else None,
        k_norm=1 + one(key + 4, d, scale=0.1) if mixer.qk_norm else None,
    )  # fmt: skip
    router = RouterWeights(one(key + 5, ROUTER.num_experts, HIDDEN, scale=HIDDEN**-0.5))
    norm = 1 + one(key + 6, HIDDEN, scale=0.1)
    return LayerWeights(input_norm=norm, mixer=attend, post_norm=norm, mlp=MoEWeights(router=router, shared=None))


def cache_of(mixer: GQA, batch: int, capacity: int, key: int, dtype: Any = BF16) -> KV:
    shape = (batch, mixer.num_kv_heads, capacity, mixer.head_dim)
    return KV(draw(key, *shape, dtype=dtype), draw(key + 1, *shape, dtype=dtype))


class Attempt(Job):
    """A job that may fail, as some block shapes do: it then has no time, and the error in its place."""

    def compile(self) -> Any:
        try:
            return super().compile()
        except Exception as error:  # whatever a compiler raises
            return error

    def measure(self, compiled: Any, rounds: int = 15, in_flight: int = 6) -> float:
        if isinstance(compiled, Exception):
            print(f"{self.labels}: {str(compiled)[:300]}", file=sys.stderr)
            return float("nan")
        return super().measure(compiled, rounds, in_flight)


def worst(actual: Any, expected: Any, tolerance: float, what: str) -> float:
    """Largest difference, relative to the largest value; raises beyond the tolerance."""
    worst_of_all = 0.0
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        difference = float(np.abs(a - b).max() / max(1e-6, np.abs(b).max()))
        if not difference <= tolerance:
            raise AssertionError(f"{what}: differs by {difference:.2e} of the largest value, expected {tolerance:.0e}")
        worst_of_all = max(worst_of_all, difference)
    return worst_of_all


def check(seed: int) -> tuple[dict[str, float], list[str]]:
    """Every kernel through the functions the model calls, against plain XLA: largest differences, and what failed."""
    found: dict[str, float] = {}
    failed: list[str] = []

    def attempt(f: Callable[..., None], case: Any) -> None:
        try:
            f(case)
        except Exception as error:  # timing goes on all the same
            failed.append(f"{f.__name__} {case if isinstance(case, int) else case[0]}: {str(error)[:500]}")

    def mixing(case: tuple[str, GQA, Any, int, list[int]]) -> None:
        name, mixer, dtype, capacity, at = case
        layer, w = layer_of(mixer), weights_of(mixer, seed, dtype)
        positions = jnp.array(at, jnp.int32)[:, None]
        x = draw(seed + 9, len(at), 1, HIDDEN, dtype=dtype)
        active, kv = jnp.ones(len(at), bool), cache_of(mixer, len(at), capacity, seed + 10, dtype)
        step = jax.jit(partial(fused.mix, layer=layer), static_argnames="kernels")
        expected = step(x, kv, positions, active, w, kernels=XLA)
        tolerance = 1e-4 if dtype == jnp.float32 else 2e-2
        for kernels in PARTS.values():
            actual = step(x, kv, positions, active, w, kernels=kernels)
            found[name] = max(found.get(name, 0.0), worst(actual, expected, tolerance, name))
        # Alone and in another capacity: the same bits.
        whole, row = step(x, kv, positions, active, w, kernels=ALL), len(at) - 1
        short = jax.tree.map(lambda a: a[row:, :, : at[-1] + 1], kv)
        alone, _ = step(x[row:], short, positions[row:], active[row:], w, kernels=ALL)
        np.testing.assert_array_equal(np.float32(alone[0]), np.float32(whole[0][row]), err_msg=f"{name}: batch matters")

    def routing(batch: int) -> None:
        layer, w = layer_of(PEER), weights_of(PEER, seed)
        x, active, tokens = draw(seed + 9, batch, 1, HIDDEN), jnp.ones(batch, bool), jnp.zeros(batch, jnp.int32)
        route = jax.jit(partial(fused.route, layer=layer), static_argnames="kernels")
        (normed, _, ids, shares), (expected, _, its, theirs) = (
            route(x, tokens, active, w, kernels=kernels) for kernels in (ALL, XLA)
        )
        worst(normed, expected, 1e-2, "router's input")
        worst(jnp.sort(ids), jnp.sort(its), 0, "router's choice")
        found[f"router, batch {batch}"] = worst(jnp.sort(shares), jnp.sort(theirs), 1e-2, "router's weights")

    plain = dataclasses.replace(PEER, qk_norm=None, rope=dataclasses.replace(ROPE, rotary_dim=64))
    cases = [
        ("bf16", PEER, BF16, 1024, [1000]),
        ("bf16, batch 4", PEER, BF16, 6000, [0, 64, 5999, 3000]),
        ("float32", PEER, jnp.float32, 300, [63, 200]),
        ("bf16, sinks", OSS, BF16, 1024, [700]),
        ("bf16, sinks, window", dataclasses.replace(OSS, sliding_window=128), BF16, 128, [50, 127]),
        ("bf16, half a head turned", plain, BF16, 512, [300]),
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(partial(attempt, mixing), cases))
        list(pool.map(partial(attempt, routing), (1, 4)))
    return {name: float(f"{value:.2e}") for name, value in found.items()}, failed


def mix_jobs(layers: int) -> Iterator[Job]:
    """The first half of a layer, with and without the kernels."""
    w = [weights_of(PEER, 100 * index) for index in range(layers)]
    layer = layer_of(PEER)
    for batch in (1, 4):
        for position, capacity in ((200, 1024), (1000, 1024), (1000, 4096), (4000, 4096)):
            at = jnp.full((batch, 1), position, jnp.int32)

            def state(batch: int = batch, capacity: int = capacity) -> Any:
                caches = [cache_of(PEER, batch, capacity, index) for index in range(layers)]
                return draw(1, batch, 1, HIDDEN), caches

            for name, kernels in PARTS.items():

                def program(state: Any, w: Any, at: Array, kernels: DecodeKernels = kernels) -> Any:
                    x, caches = state
                    active = jnp.ones(x.shape[0], bool)
                    new = []
                    for cache, weights in zip(caches, w, strict=True):
                        x, cache = fused.mix(x, cache, at, active, weights, layer, kernels)
                        x = jax.lax.optimization_barrier(x / 2)  # or it would grow from step to step
                        new.append(cache)
                    return x, new

                labels = {"kernels": name, "batch": batch, "position": position, "capacity": capacity}
                yield Attempt(labels=labels, program=program, state=state, inputs=(w, at), calls=layers)


def attention_jobs(layers: int, sweep: bool) -> Iterator[Job]:
    """Attention alone in several divisions."""
    configs = [attention.Config()]
    if sweep:
        grid = [(16, 4), (32, 1), (32, 2), (32, 4), (64, 2), (64, 8), (128, 4), (128, 8)]
        configs += [attention.Config(tile=tile, warps=warps) for tile, warps in grid]
        configs += [attention.Config(splits=32), attention.Config(combine_warps=2), attention.Config(combine_warps=8)]
    norms = draw(1, 128), draw(2, 128)
    for batch, position, capacity in ((1, 200, 1024), (1, 1000, 1024), (1, 4000, 4096), (4, 1000, 1024)):
        at = jnp.full(batch, position, jnp.int32)
        for config in configs:

            def program(state: Any, at: Array, norms: Any, config: attention.Config = config) -> Any:
                qkv, caches = state
                cos, sin = ROPE.factors(at, 128, BF16)
                new = []
                for cache in caches:
                    out, *kv = decode_attention(
                        qkv, cache.k, cache.v, at, cos, sin, heads=heads_of(PEER), q_norm=norms[0], k_norm=norms[1],
                        config=config,
                    )  # fmt: skip
                    qkv = qkv.at[:, : out.shape[1]].set(out)
                    new.append(KV(*kv))
                return qkv, new

            def state(batch: int = batch, capacity: int = capacity) -> Any:
                return draw(3, batch, 5120), [cache_of(PEER, batch, capacity, index) for index in range(layers)]

            labels = {"attention": str(config), "batch": batch, "position": position, "capacity": capacity}
            yield Attempt(labels=labels, program=program, state=state, inputs=(at, norms), calls=layers)


def matvec_jobs(layers: int, sweep: bool) -> Iterator[Job]:
    """Projections in plain XLA and by the kernel in several block shapes; of the head there is only one."""
    shapes = {
        "qkv": (5120, HIDDEN), "o": (HIDDEN, 4096), "router": (128, HIDDEN), "router of 32": (32, HIDDEN),
        "head": (VOCAB, HIDDEN),
    }  # fmt: skip
    for name, (outputs, width) in shapes.items():
        count = 2 if name == "head" else layers
        w = [draw(index, outputs, width, scale=width**-0.5) for index in range(count)]
        factor = draw(7, width)
        normed = name != "o"
        default = default_config(width, 2)
        configs: list[projection.Config | None] = [None, default]
        if sweep:
            grid = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 2), (4, 4), (4, 8), (8, 4), (8, 8), (16, 8)]
            configs += [dataclasses.replace(default, rows=rows, warps=warps) for rows, warps in grid]
        for batch in (1, 4):
            for config in dict.fromkeys(configs):

                def program(
                    x: Array, w: Any, factor: Array, config: Any = config, normed: bool = normed, outputs: int = outputs
                ) -> Array:
                    for matrix in w:
                        if config is None:
                            y = linear(NORM(x, factor) if normed else x, matrix)
                        else:
                            how: dict[str, Any] = {"norm": NORM, "norm_weight": factor} if normed else {}
                            y, *_ = matvec(x, matrix, config=config, **how)
                        x = jax.lax.optimization_barrier(x.at[:, : min(outputs, x.shape[1])].set(y[:, : x.shape[1]]))
                    return x

                labels = {"matrix": name, "config": str(config or "xla"), "batch": batch, "bytes": outputs * width * 2}
                state = partial(draw, 5, batch, width)
                yield Attempt(labels=labels, program=program, state=state, inputs=(w, factor), calls=count)


def route_jobs(layers: int) -> Iterator[Job]:
    """Norm, router and choice, with and without the kernels."""
    w, layer = [weights_of(PEER, 100 * index) for index in range(layers)], layer_of(PEER)
    for batch in (1, 4):
        for name, kernels in (("xla", XLA), ("gpu", ALL)):

            def program(x: Array, w: Any, kernels: DecodeKernels = kernels) -> Array:
                active, tokens = jnp.ones(x.shape[0], bool), jnp.zeros(x.shape[0], jnp.int32)
                for weights in w:
                    normed, _, ids, shares = fused.route(x, tokens, active, weights, layer, kernels)
                    x = normed[:, None] + (shares * ids).sum(axis=1).astype(BF16)[:, None, None] / 1024
                    x = jax.lax.optimization_barrier(x)
                return x

            labels = {"router": name, "batch": batch}
            state = partial(draw, 5, batch, 1, HIDDEN)
            yield Attempt(labels=labels, program=program, state=state, inputs=(w,), calls=layers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--layers", type=int, default=24, help="layers chained in one jit")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the checks' inputs")
    parser.add_argument("--minutes", type=float, default=60, help="stop after about this time and write what there is")
    parser.add_argument("--sweep", action="store_true", help="also other block shapes")
    parser.add_argument("--parts", nargs="+", choices=PARTS_TIMED, default=PARTS_TIMED, metavar="PART",
                        help=f"what to time: {', '.join(PARTS_TIMED)}")  # fmt: skip
    args = parser.parse_args()
    if resolve(None) != "gpu":
        print(f"bench_decode_kernels: needs a GPU, JAX found {jax.default_backend()}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * args.minutes
    differences, failed = check(args.seed)
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "seed": args.seed,
        "largest differences": differences,
        "failed": failed,
    }
    print(*report.items(), sep="\n", flush=True)
    parts = {
        "mix": lambda: mix_jobs(args.layers),
        "route": lambda: route_jobs(args.layers),
        "matvec": lambda: matvec_jobs(args.layers, args.sweep),
        "attention": lambda: attention_jobs(args.layers, args.sweep),
    }
    for name, jobs in parts.items():
        if name not in args.parts:
            continue
        report[name] = run_jobs(list(jobs()), deadline)
        for row in report[name]:
            if row["us"] and row["us"] > 0 and "bytes" in row:  # NaN: it failed
                row["GB/s"] = round(row["bytes"] / row["us"] / 1e3)
        print_table(report[name])
        if args.out:  # after every part: an interrupted run keeps what it has
            with open(args.out, "w") as file:
                json.dump(report, file, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
