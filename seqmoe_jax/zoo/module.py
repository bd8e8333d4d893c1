"""The arrays of a Flax NNX module by their paths, as NumPy sees them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from seqmoe_jax.errors import CheckpointError

# What is no weight: it is left alone, and nobody misses it.
STATE = (nnx.RngState, nnx.Cache, nnx.Intermediate, nnx.BatchStat, nnx.Perturbation)


class ModuleArrays:
    """The weights of a module. Paths are names of attributes and places in lists, joined by dots.

    With `release`, what has been taken leaves the module: then its variable holds a `jax.ShapeDtypeStruct`, as one of
    `nnx.eval_shape` does.
    """

    def __init__(self, module: nnx.Module, *, release: bool):
        self._release = release
        # A variable that several attributes refer to is there once, under the first.
        self._variables = {
            ".".join(map(str, path)): value
            for path, value in nnx.iter_graph(module)
            if isinstance(value, nnx.Variable) and not isinstance(value, STATE)
        }
        self.paths = frozenset(self._variables)

    def value(self, path: str) -> jax.Array | np.ndarray:
        """The array as the module has it. Raises `CheckpointError` where there is none any more."""
        value = self._variables[path].get_value()
        if isinstance(value, jax.ShapeDtypeStruct) or (isinstance(value, jax.Array) and value.is_deleted()):
            raise CheckpointError(
                f"{path}: expected an array, got none any more: this module was given away before (from_nnx takes its "
                "arrays; release=False leaves them), or was made by nnx.eval_shape"
            )
        if not isinstance(value, jax.Array | np.ndarray):
            kind = type(value).__name__
            raise CheckpointError(f"{path}: expected an array, got {kind}; give a model of plain arrays")
        return value

    def shape(self, path: str) -> tuple[int, ...]:
        return tuple(self.value(path).shape)

    def dtype(self, path: str) -> np.dtype:
        return np.dtype(self.value(path).dtype)

    def nbytes(self, platform: str) -> int:
        """Bytes of the weights that lie on devices of a platform; NumPy arrays lie on "cpu"."""
        return sum(value.nbytes for path in self.paths if _platform(value := self.value(path)) == platform)

    def read(self, path: str) -> np.ndarray:
        """The array in host memory: a view where it is there already."""
        value = self.value(path)
        if isinstance(value, jax.Array) and not self._release and _platform(value) != "cpu":
            value = jnp.copy(value)  # or JAX would keep the host's copy beside the module's array
        return np.asarray(value)

    def drop(self, *paths: str) -> None:
        """These have been read."""
        for path in paths if self._release else ():
            value = self._variables[path].get_value()
            self._variables[path].set_value(jax.ShapeDtypeStruct(value.shape, value.dtype))


def _platform(value: jax.Array | np.ndarray) -> str:
    return next(iter(value.devices())).platform if isinstance(value, jax.Array) else "cpu"
