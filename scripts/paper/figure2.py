"""Figure 2: routing can be forecast from its sequence, and not from its steps in another order.

    python -m scripts.paper.figure2 TRACE.npz --out figure2.json

Trains a causal Transformer and the product's Mamba2 predictor, both from activations alone (the paper's input) and by
its loss, on the sequences as they are and with the steps of each in random order; prints loss and recall of the top
K + 3 on held-out sequences as training goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from seqmoe_jax.cli.stretch_trace import fewer
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.data import Batch, Steps, batches, prepare, sample
from seqmoe_jax.forecast.evaluation.metrics import TOP, add_hits, no_hits
from seqmoe_jax.forecast.heads import Inputs
from seqmoe_jax.forecast.predictor import Predictor
from seqmoe_jax.forecast.training.losses import divergence, weighted_mean
from seqmoe_jax.traces.format import Trace, read_trace


class Block(nnx.Module):
    """A pre-norm block of a decoder."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.before, self.between = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = x + self.attention(self.before(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.between(x))))


class Transformer(nnx.Module):
    """A decoder over steps: routing in, logits of the next step's routing out, as `Predictor` gives them."""

    def __init__(self, config: PredictorConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.read = nnx.Linear(config.keys, config.d_model, rngs=rngs)
        self.blocks = nnx.List([Block(config.d_model, config.d_model // 32, rngs=rngs) for _ in range(config.blocks)])
        self.norm = nnx.RMSNorm(config.d_model, rngs=rngs)
        self.write = nnx.Linear(config.d_model, config.keys, rngs=rngs)

    def __call__(self, inputs: Inputs) -> Float[Array, "B T L E"]:
        features = inputs.features.astype(jnp.float32)
        x = self.read(features**self.config.power) + positions(features.shape[1], self.config.d_model)
        for block in self.blocks:
            x = block(x)
        return self.write(self.norm(x)).reshape(*x.shape[:2], self.config.layers, self.config.experts)


def positions(length: int, width: int) -> Float[Array, "T D"]:
    """Sines and cosines of positions, so that sequences may be longer than those of training."""
    angle = jnp.arange(length)[:, None] / 10000 ** (jnp.arange(width // 2)[None] / (width // 2))
    return 0.3 * jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def mamba2(config: PredictorConfig, *, rngs: nnx.Rngs) -> nnx.Module:
    """The product's predictor; of its heads only the next step's is trained here."""
    return Predictor(config, rngs=rngs)


def logits_of(model: Any, batch: Batch) -> Float[Array, "B T L E"]:
    return model(batch.inputs) if isinstance(model, Transformer) else model(batch.inputs, valid=batch.valid).next


MODELS: dict[str, Callable[..., nnx.Module]] = {"transformer": Transformer, "mamba2": mamba2}


def shuffled(trace: Trace, seed: int = 0) -> Trace:
    """The trace with the steps of each sequence in random order."""
    random = np.random.default_rng(seed)
    order = np.concatenate([start + random.permutation(stop - start) for start, stop in trace.spans()])
    return dataclasses.replace(trace, ids=trace.ids[order], probs_u8=trace.probs_u8[order], tok=trace.tok[order])


def recall(graph: Any, params: Any, config: PredictorConfig, steps: Steps) -> float:
    """Of the top K + 3 on all sequences."""
    forward = jax.jit(lambda params, batch: logits_of(nnx.merge(graph, params), batch))
    hits = no_hits(config)
    for batch in batches(steps, config):
        hits = add_hits(hits, forward(params, batch), batch.target, batch.scored, config.active)
    return float(hits.recall(config.active)[TOP].mean())


def train(name: str, config: PredictorConfig, fitted: Steps, held: Steps, args: argparse.Namespace) -> list[Any]:
    """Loss and recall every `--every` updates."""
    graph, params = nnx.split(MODELS[name](config, rngs=nnx.Rngs(args.seed)), nnx.Param)
    peak, warmup = args.learning_rate, min(20, args.updates // 4)
    schedule = optax.warmup_cosine_decay_schedule(0, peak, warmup, args.updates, peak / 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))

    def loss_of(params: Any, batch: Batch) -> Array:
        logits = logits_of(nnx.merge(graph, params), batch)
        target = batch.target.reshape(logits.shape)
        return weighted_mean(divergence(logits, target).mean(-1), batch.scored.astype(jnp.float32))

    @jax.jit
    def update(params: Any, state: Any, key: Array) -> tuple[Any, Any, Array]:
        batch = sample(fitted, key, args.batch, args.window, 0.5, config)
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, loss

    state, records, begun = optimizer.init(params), [], time.perf_counter()
    for number in range(1, args.updates + 1):
        params, state, loss = update(params, state, jax.random.fold_in(jax.random.key(args.seed), number))
        if number % args.every == 0 or number == args.updates:
            record = {"update": number, "loss": round(float(loss), 4)}
            record |= {"recall": round(recall(graph, params, config, held), 4)}
            records.append(record | {"seconds": round(time.perf_counter() - begun, 1)})
            print(name, records[-1], flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--train-steps", type=int, default=150_000, help="of the split train (default: 150,000, all)")
    parser.add_argument("--test-sequences", type=int, default=1000, help="of the split test, the first (default: all)")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--every", type=int, default=50, help="updates between two evaluations")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    trace = fewer(read_trace(args.trace), args.train_steps)
    train_part, held_part = trace.select("train"), trace.select("test")
    held_part = held_part.take(np.arange(min(args.test_sequences, held_part.sequences)))
    config = PredictorConfig(
        model=trace.model or "", **trace.sizes, inputs="activations", d_model=args.width, blocks=args.blocks, echo=0
    )
    said: dict[str, Any] = {"settings": {name: str(value) for name, value in vars(args).items()}}
    said |= {"train_steps": train_part.steps, "test_steps": held_part.steps}
    for name in args.models:
        for order, change in (("ordered", lambda part: part), ("shuffled", shuffled)):
            print(f"{name}, {order}", flush=True)
            fitted, held = (prepare(change(part), config, None) for part in (train_part, held_part))
            said[f"{name}, {order}"] = train(name, config, fitted, held, args)
            args.out.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
