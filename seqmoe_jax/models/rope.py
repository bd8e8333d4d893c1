"""Rotary position embedding (RoPE): which dimensions of a head are rotated, in which pairs, how fast; YaRN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN (arXiv 2309.00071, section 3.2): stretches a context by `factor`.

    Frequencies of fewer than `beta_slow` rotations over the original context are divided by `factor`, those of more
    than `beta_fast` are kept, those between are blended. `truncate` rounds the ends of the blend outwards to whole
    dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def mscale(self, weight: float = 1.0) -> float:
        """0.1 weight ln(factor) + 1: with weight 1, the attention factor unless a model says otherwise."""
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def blend(self, theta: float, rotary_dim: int) -> np.ndarray:
        """How far each frequency is divided by the factor, from 0 (kept) to 1, `[rotary_dim / 2]`."""
        context = self.original_max_position_embeddings

        def dimension(rotations: float) -> float:
            return rotary_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        # Their order is as it falls: as in transformers, ends outside of the dimensions may come the wrong way round.
        return np.clip((np.arange(rotary_dim // 2) - low) / (high - low or 0.001), 0, 1)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotates `rotary_dim` dimensions of a head by angle position * theta^(-2i / rotary_dim); the others pass.

    layout: "half" pairs dimension i with i + rotary_dim / 2, "pairs" (interleaved) 2i with 2i + 1.
    rotated: which dimensions of the head are rotated, the first or the last.
    attention_factor: cosines and sines are multiplied by it (YaRN).
    """

    theta: float
    rotary_dim: int
    layout: Literal["half", "pairs"] = "half"
    rotated: Literal["first", "last"] = "first"
    yarn: Yarn | None = None
    attention_factor: float = 1.0

    @property
    def inv_freq(self) -> np.ndarray:
        """Radians per position, float32 `[rotary_dim / 2]`."""
        plain = self.theta ** -(np.arange(0, self.rotary_dim, 2) / self.rotary_dim)
        if self.yarn is not None:
            blend = self.yarn.blend(self.theta, self.rotary_dim)
            plain = plain / self.yarn.factor * blend + plain * (1 - blend)
        return plain.astype(np.float32)

    def __call__(
        self, x: Float[Array, "B T N D"], positions: Int[Array, "B T"], *, inverse: bool = False
    ) -> Float[Array, "B T N D"]:
        """Rotates `x` by its positions, or back. Angles are float32, cosines and sines of the activations' dtype."""
        cos, sin = self._cos_sin(positions[..., None, None], x.dtype, inverse)
        passing = x.shape[-1] - self.rotary_dim
        rotary = x[..., : self.rotary_dim] if self.rotated == "first" else x[..., passing:]
        if self.layout == "half":
            a, b = rotary[..., : self.rotary_dim // 2], rotary[..., self.rotary_dim // 2 :]
            out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        else:
            a, b = rotary[..., ::2], rotary[..., 1::2]
            out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rotary.shape)
        if not passing:
            return out
        parts = [out, x[..., self.rotary_dim :]] if self.rotated == "first" else [x[..., :passing], out]
        return jnp.concatenate(parts, axis=-1)

    def factors(
        self, positions: Int[Array, " B"], head_dim: int, dtype: jnp.dtype
    ) -> tuple[Float32[Array, "B D"], Float32[Array, "B D"]]:
        """The rotation as kernels take it: what each dimension's value is multiplied by, and what its partner's is.

        Dimensions that pass have 1 and 0.
        """
        cos, sin = (x.astype(jnp.float32) for x in self._cos_sin(positions[:, None], dtype, False))
        if self.layout == "half":
            cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
        else:
            cos, sin = (jnp.stack(x, axis=-1).reshape(len(positions), -1) for x in ((cos, cos), (-sin, sin)))
        passing = head_dim - self.rotary_dim
        around = ((0, 0), (0, passing) if self.rotated == "first" else (passing, 0))
        return jnp.pad(cos, around, constant_values=1.0), jnp.pad(sin, around)

    def _cos_sin(
        self, positions: Int[Array, "*batch 1"], dtype: jnp.dtype, inverse: bool
    ) -> tuple[Float[Array, "*batch d"], Float[Array, "*batch d"]]:
        angle = positions.astype(jnp.float32) * self.inv_freq
        factor = self.attention_factor
        cos = (jnp.cos(angle) * factor).astype(dtype)
        sin = (jnp.sin(angle) * (-factor if inverse else factor)).astype(dtype)
        return cos, sin
