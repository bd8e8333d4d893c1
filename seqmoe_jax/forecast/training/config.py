"""What a training run does: its length, its optimiser, the weights of its losses."""

from __future__ import annotations

import dataclasses

import jax
import optax

from seqmoe_jax.forecast.mamba2 import D_CONV
from seqmoe_jax.forecast.noise import NoiseRates


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Hyperparameters of a run of `updates` updates, each of `batch` windows of up to `window` steps."""

    updates: int = 600
    batch: int = 16
    window: int = 512
    validate_every: int = 50  # updates between validations
    patience: int = 3  # validations without a better one before the run stops
    bfloat16: bool = True
    learning_rate: float = 2e-3  # at its highest
    warmup: int = 40  # updates before that, at most half of all
    weight_decay: float = 1.0
    ema_decay: float = 0.99  # of the moving average of the weights, per update
    noise: NoiseRates = dataclasses.field(default_factory=NoiseRates)
    crop: float = 0.5  # share of windows that begin anywhere in the first half of their sequence
    sampling: float = 0.0  # scheduled sampling: share of positions where a span of own forecasts begins
    flatten: float = 0.5  # share of the uniform distribution over the routed experts in the target
    margin: float = 1.0
    # Weights of losses.
    ranking: float = 0.05
    membership: float = 0.25
    teaching: float = 0.7  # share of the teachers' forecasts in the target, where there are teachers


def optimizer(training: TrainConfig) -> optax.GradientTransformation:
    """AdamW with a linear warm-up and a cosine to a hundredth of the highest learning rate."""
    peak, warmup = training.learning_rate, min(training.warmup, training.updates // 2)
    schedule = optax.warmup_cosine_decay_schedule(
        peak / max(warmup, 1), peak, warmup, training.updates, end_value=0.01 * peak
    )

    def decays(params: optax.Params) -> optax.Params:
        """Matrices decay; norms, biases, convolutions and time constants do not."""
        return jax.tree.map(lambda param: param.ndim == 2 and param.shape[0] > D_CONV, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=training.weight_decay, mask=decays),
    )
