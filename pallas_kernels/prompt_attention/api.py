"""The public function of the attention of prompts."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Implementation, resolve
from pallas_kernels.prompt_attention import reference
from pallas_kernels.prompt_attention.config import PromptAttentionConfig, unfit_sizes


def prompt_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B G C D"],
    v: Float[Array, "B G C V"] | None,
    first_query: Int[Array, " B"],
    first_key: Int[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    value_size: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: PromptAttentionConfig | None = None,
) -> Float[Array, "B T N V"]:
    """Causal softmax attention of T consecutive positions of every sequence.

    Args:
      q: queries, normed and rotated; N is a multiple of G, and N / G of them share a key/value head.
      k, v: keys and values at consecutive positions. Of those that no query sees nothing is read.
      first_query, first_key: positions of the first query and of the first key. Keys at negative positions are empty.
      scale: of the scores.
      window: a position sees itself and the `window - 1` before it; None: all.
      value_size: with `v` None, a value is the first so many dimensions of its key (latent attention).
      sinks: scores that join each head's softmax and take their share to nowhere.
      implementation: `xla` or `gpu`; by default the best of this process's backend. There is none for TPUs: `tpu` means
        `xla`.
      interpret: run the kernel in the interpreter, on any backend.
      config: block shapes of the kernel; by default chosen from the sizes.

    Scores and sums are float32. Powers of the softmax are rounded to the dtype of `q` before they meet the values.
    Work grows with the positions that are seen, memory with neither these nor C: keys go by in tiles (online softmax,
    arXiv 2205.14135). Tiles are counted from the first key, so a result depends on neither the batch nor C.

    Raises `ValueError` for sizes that the kernel does not take.
    """
    if (v is None) == (value_size is None):
        raise ValueError("prompt_attention: give values, or their size within the keys")
    if k.dtype != q.dtype or (v is not None and v.dtype != q.dtype):
        raise ValueError(f"prompt_attention: expected keys and values of {q.dtype} like q, got {k.dtype}")
    first_query, first_key = first_query.astype(jnp.int32), first_key.astype(jnp.int32)
    if resolve(implementation) == "gpu":
        if reason := unfit_sizes(k.shape[3], value_size if v is None else v.shape[3]):
            raise ValueError(f"prompt_attention: {reason}")
        from pallas_kernels.prompt_attention import gpu  # Pallas is slow to import and absent from some builds

        return gpu.prompt_attention(
            q, k, v, first_query, first_key, scale=scale, window=window, value_size=value_size, sinks=sinks,
            config=config, interpret=interpret,
        )  # fmt: skip
    return reference.prompt_attention(
        q, k, v, first_query, first_key, scale=scale, window=window, value_size=value_size, sinks=sinks
    )
