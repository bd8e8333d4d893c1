"""Rotary positions: which dimensions of a head turn, in which pairs, how fast; YaRN (arXiv 2309.00071)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Frequencies below `beta_slow` turns over the original context are divided by `factor`, those above `beta_fast`
    kept, those between blended.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the ends of the blend are rounded outwards to whole dimensions

    def mscale(self, weight: float = 1.0) -> float:
        """0.1 weight ln(factor) + 1. With weight 1, what cosines and sines are multiplied by unless a model says
        otherwise."""
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def blend(self, theta: float, dims: int) -> np.ndarray:
        """Per frequency, `[dims / 2]`: 0 keeps it, 1 divides it by the factor."""

        def dimension(turns: float) -> float:
            return dims * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        return np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Turns `dims` dimensions of a head by angle position * theta^(-2i / dims); the others pass.

    layout: "half" pairs dimension i with i + dims / 2, "pairs" 2i with 2i + 1.
    part: which dimensions of the head turn, the first or the last.
    magnitude: cosines and sines are multiplied by it (YaRN's attention factor).
    """

    theta: float
    dims: int
    layout: Literal["half", "pairs"] = "half"
    part: Literal["first", "last"] = "first"
    yarn: Yarn | None = None
    magnitude: float = 1.0

    @property
    def frequencies(self) -> np.ndarray:
        """Radians per position, float32 [dims / 2]."""
        plain = self.theta ** -(np.arange(0, self.dims, 2) / self.dims)
        if self.yarn is not None:
            blend = self.yarn.blend(self.theta, self.dims)
            plain = plain / self.yarn.factor * blend + plain * (1 - blend)
        return plain.astype(np.float32)

    def __call__(
        self, x: Float[Array, "B T N D"], positions: Int[Array, "B T"], *, inverse: bool = False
    ) -> Float[Array, "B T N D"]:
        """Turns `x` by its positions, or back. Angles are float32, cosines and sines of the activations' dtype."""
        cos, sin = self._factors(positions[..., None, None], x.dtype, inverse)
        still = x.shape[-1] - self.dims
        turning = x[..., : self.dims] if self.part == "first" else x[..., still:]
        if self.layout == "half":
            a, b = turning[..., : self.dims // 2], turning[..., self.dims // 2 :]
            turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        else:
            a, b = turning[..., ::2], turning[..., 1::2]
            turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turning.shape)
        if not still:
            return turned
        rest = [turned, x[..., self.dims :]] if self.part == "first" else [x[..., :still], turned]
        return jnp.concatenate(rest, axis=-1)

    def factors(
        self, positions: Int[Array, " B"], head_dim: int, dtype: jnp.dtype
    ) -> tuple[Float32[Array, "B D"], Float32[Array, "B D"]]:
        """What kernels turn by: of each dimension's value, and of its partner's. Dimensions that pass have 1 and 0."""
        cos, sin = (x.astype(jnp.float32) for x in self._factors(positions[:, None], dtype, False))
        if self.layout == "half":
            cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
        else:
            cos, sin = (jnp.stack(x, axis=-1).reshape(len(positions), -1) for x in ((cos, cos), (-sin, sin)))
        still = head_dim - self.dims
        around = ((0, 0), (0, still) if self.part == "first" else (still, 0))
        return jnp.pad(cos, around, constant_values=1.0), jnp.pad(sin, around)

    def _factors(
        self, positions: Int[Array, "*batch 1"], dtype: jnp.dtype, inverse: bool
    ) -> tuple[Float[Array, "*batch d"], Float[Array, "*batch d"]]:
        angle = positions.astype(jnp.float32) * self.frequencies
        cos = (jnp.cos(angle) * self.magnitude).astype(dtype)
        sin = (jnp.sin(angle) * (-self.magnitude if inverse else self.magnitude)).astype(dtype)
        return cos, sin
