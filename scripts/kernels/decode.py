"""Check and time the kernels around a decode step's experts beside plain XLA: projections, attention, the router.

    python -m scripts.kernels.decode --minutes 2 --out decode.json [--sweep] [--parts matvec attention]

Every call of a chain has weights and a cache of its own, as the layers of a step have.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.decode_attention import DecodeAttentionConfig, Heads, decode_attention
from pallas_kernels.matvec import MatvecConfig, matvec
from pallas_kernels.matvec.config import default_config
from pallas_kernels.router_choice import Choice, router_choice
from scripts.kernels.harness import BF16, Job, compare, difference, draw, jitted, parser, run
from seqmoe_jax.models.norms import RMSNorm

NORM = RMSNorm(eps=1e-6)


class Shape(NamedTuple):
    hidden: int
    heads: Heads
    experts: int
    top_k: int
    vocab: int
    positions: tuple[tuple[int, int], ...]  # and capacity
    dtype: Any


def heads_of(num_heads: int, num_kv_heads: int, head_dim: int) -> Heads:
    return Heads(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5, norm=NORM,
        norm_over="head", clip=None, rotary_dim=head_dim, rotary_offset=0, rotary_layout="half",
    )  # fmt: skip


SHAPES = {
    "peer": Shape(
        2048, heads_of(32, 4, 128), 32, 4, 151_936, ((200, 1024), (1000, 1024), (1000, 4096), (4000, 4096)), BF16
    ),
    "qwen3-30b": Shape(2048, heads_of(32, 4, 128), 128, 8, 151_936, ((1000, 1024), (4000, 4096)), BF16),
    "gpt-oss": Shape(2880, heads_of(64, 8, 64), 32, 4, 201_088, ((1000, 1024), (4000, 4096)), BF16),
    "tiny": Shape(64, heads_of(4, 2, 16), 8, 2, 96, ((9, 32),), jnp.float32),
}


def matvec_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """One matrix alone: of the head there is only one in a model, but two are chained."""
    for name, batch in itertools.product(args.shapes, args.batches):
        shape, heads = SHAPES[name], SHAPES[name].heads
        queries, keys = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        matrices = {
            "qkv": (queries + 2 * keys, shape.hidden), "o": (shape.hidden, queries),
            "router": (shape.experts, shape.hidden), "head": (shape.vocab, shape.hidden),
        }  # fmt: skip
        for matrix, (outputs, width) in matrices.items():
            calls = min(2, args.layers) if matrix == "head" else args.layers
            w = [draw(index, outputs, width, scale=width**-0.5, dtype=shape.dtype) for index in range(calls)]
            weight, state = draw(7, width, dtype=shape.dtype), partial(draw, 5, batch, width, dtype=shape.dtype)
            call: Any = partial(matvec, norm_weight=weight, norm=None if matrix == "o" else NORM)
            kernel = partial(call, implementation="gpu", interpret=args.interpret)
            ways: dict[str, Any] = {"xla": partial(call, implementation="xla"), "default": kernel}
            if args.sweep:
                ways |= {str(config): partial(kernel, config=config) for config in other_configs(width, w[0])}
            for label, call in jitted(ways).items():
                yield Job(
                    labels={"matvec": name, "matrix": matrix, "batch": batch, "config": label},
                    program=partial(matvec_chain, call), state=state, inputs=(w,), calls=calls, nbytes=w[0].nbytes,
                    check=partial(compare, call, ways["xla"], state, w[0], tolerance=1e-2),
                )  # fmt: skip


def matvec_chain(call: Any, x: Array, w: Any) -> Array:
    for matrix in w:
        y = call(x, matrix).out[:, : x.shape[1]]
        x = jax.lax.optimization_barrier(x.at[:, : y.shape[1]].set(y))
    return x


def other_configs(width: int, w: Array) -> Iterator[MatvecConfig]:
    for rows, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        if warps <= 2 * rows:
            yield dataclasses.replace(default_config(width, w.dtype.itemsize), rows=rows, warps=warps)


def attention_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Attention alone, in several divisions with `--sweep`."""
    grid = itertools.product((16, 32, 64, 128), (1, 2, 4, 8)) if args.sweep else ()
    for name, batch in itertools.product(args.shapes, args.batches):
        shape, heads = SHAPES[name], SHAPES[name].heads
        dim = heads.head_dim
        one = partial(draw, dtype=shape.dtype)
        turns = jax.random.uniform(jax.random.key(3), (2, batch, dim), minval=-1)
        call = partial(attend, heads=heads, q_norm=one(1, dim), k_norm=one(2, dim))
        kernel = partial(call, implementation="gpu", interpret=args.interpret)
        ways: dict[str, Any] = {"xla": partial(call, implementation="xla"), "default": kernel}
        for tile, warps in grid:
            config = DecodeAttentionConfig(tile=tile, warps=warps)
            ways[str(config)] = partial(kernel, config=config)
        for (position, capacity), (label, call) in itertools.product(shape.positions, jitted(ways).items()):
            state = partial(qkv_and_caches, one, heads, batch, capacity, args.layers)
            operands = jnp.full(batch, position, jnp.int32), turns[0], turns[1]
            labels = {"attention": name, "batch": batch, "position": position, "capacity": capacity, "config": label}
            yield Job(
                labels=labels, program=partial(attention_chain, call), state=state, inputs=operands, calls=args.layers,
                check=partial(check_attention, label, call, ways["xla"], state, *operands),
            )  # fmt: skip


def attend(qkv: Array, kv: Any, positions: Array, cos: Array, sin: Array, **how: Any) -> Any:
    k, v = kv
    out, k, v = decode_attention(qkv, k, v, positions, cos, sin, **how)
    return out, (k, v)


def qkv_and_caches(one: Any, heads: Heads, batch: int, capacity: int, layers: int) -> Any:
    qkv = one(5, batch, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
    cache = batch, heads.num_kv_heads, capacity, heads.head_dim
    return qkv, [(one(2 * index, *cache), one(2 * index + 1, *cache)) for index in range(layers)]


def attention_chain(call: Any, state: Any, *operands: Array) -> Any:
    qkv, caches = state
    new = []
    for kv in caches:
        out, kv = call(qkv, kv, *operands)
        qkv = qkv.at[:, : out.shape[1]].set(out)
        new.append(kv)
    return qkv, new


def check_attention(
    label: str, call: Any, reference: Any, state: Any, positions: Array, cos: Array, sin: Array
) -> float:
    """Against the reference; and a sequence alone, in the least capacity, has the bits that it has in the batch."""
    qkv, (kv, *_) = state()
    got, want = (jax.jit(f)(qkv, kv, positions, cos, sin) for f in (call, reference))
    least = int(positions[-1]) + 1
    if label != "xla":
        alone = qkv[-1:], tuple(x[-1:, :, :least] for x in kv), positions[-1:], cos[-1:], sin[-1:]
        difference(jax.jit(call)(*alone)[0], got[0][-1:], 0.0)
    return difference(got, want, 1e-2)


def router_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Norm, router and choice."""
    for name, batch in itertools.product(args.shapes, args.batches):
        shape = SHAPES[name]
        choice = Choice(top_k=shape.top_k, score="softmax", normalize=True, rounded_to=jnp.dtype(shape.dtype))
        one = partial(draw, dtype=shape.dtype)
        w = [one(index, shape.experts, shape.hidden, scale=shape.hidden**-0.5) for index in range(args.layers)]
        weight, state = one(7, shape.hidden), partial(one, 5, batch, shape.hidden)

        ways: dict[str, Any] = {
            "xla": partial(route, choice=choice, how={"implementation": "xla"}),
            "gpu": partial(route, choice=choice, how={"implementation": "gpu", "interpret": args.interpret}),
        }
        for label, call in jitted(ways).items():
            yield Job(
                labels={"router": name, "batch": batch, "config": label}, program=partial(route_chain, call),
                state=state, inputs=(w, weight), calls=args.layers,
                check=partial(compare, call, ways["xla"], state, w[0], weight, tolerance=1e-2),
            )  # fmt: skip


def route(x: Array, w: Array, weight: Array, *, choice: Choice, how: Any) -> Any:
    """Experts in ascending order, their weights, and the normed input."""
    logits, normed, _ = matvec(x, w, norm=NORM, norm_weight=weight, dtype=jnp.dtype(jnp.float32), **how)
    ids, shares = router_choice(logits, jnp.ones(x.shape[0], bool), choice=choice, **how)
    return jnp.sort(ids), jnp.sort(shares), normed


def route_chain(call: Any, x: Array, w: Any, weight: Array) -> Array:
    for matrix in w:
        ids, shares, normed = call(x, matrix, weight)
        x = jax.lax.optimization_barrier(normed + (shares * ids).sum(axis=1, keepdims=True).astype(x.dtype) / 1024)
    return x


PARTS = {"matvec": matvec_jobs, "attention": attention_jobs, "router": router_jobs}


def main(argv: list[str] | None = None) -> int:
    return run(parser(__doc__, PARTS, SHAPES), PARTS, argv)


if __name__ == "__main__":
    sys.exit(main())
