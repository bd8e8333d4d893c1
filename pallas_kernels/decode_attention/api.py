"""The public function of the decode step's attention."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.backend import Implementation, resolve
from pallas_kernels.decode_attention import reference
from pallas_kernels.decode_attention.config import DecodeAttentionConfig, Heads, unfit_heads


def decode_attention(
    qkv: Float[Array, "B rows"],
    k: Float[Array, "B G C D"],
    v: Float[Array, "B G C D"],
    positions: Int[Array, " B"],
    cos: Float32[Array, "B D"],
    sin: Float32[Array, "B D"],
    *,
    heads: Heads,
    q_norm: Float[Array, " n"] | None = None,
    k_norm: Float[Array, " m"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: DecodeAttentionConfig | None = None,
) -> tuple[Float[Array, "B ND"], Float[Array, "B G C D"], Float[Array, "B G C D"]]:
    """One new position of every sequence: norms and rotates queries and keys, writes the cache, attends.

    Args:
      qkv: rows of N queries, G keys and G values of size D, in this order; more may follow and are ignored.
      k, v: the cache, in the dtype of `qkv`; position p lies at p mod C. Updated in place where donated.
      positions: of the new tokens. Attention is over all that the cache holds up to them: with a window, C is at most
        the window.
      cos, sin: factors of every dimension and of its partner, of rounded values (`Rope.factors`).
      heads: their numbers and sizes, and what happens to them before attention.
      q_norm, k_norm: weights of the norms, `[D]`, or `[N D]` and `[G D]` where they are over the full width.
      sinks: scores that join each head's softmax and take their share to nowhere.
      implementation: `xla` or `gpu`; by default the best of this process's backend. There is none for TPUs: `tpu` means
        `xla`.
      interpret: run the kernels in the interpreter, on any backend.
      config: block shapes of the kernels; by default chosen from the heads' size.

    Returns the heads' outputs and the cache. Sums are float32. The kernels round the powers of the softmax to the dtype
    of `qkv` before they meet the values; plain XLA rounds them after the division by their sum, so bf16 results may
    differ in the last bits.

    Raises `ValueError` for a cache of another dtype, and for heads that the kernels do not take.
    """
    if k.dtype != qkv.dtype or v.dtype != qkv.dtype:
        raise ValueError(f"decode_attention: expected a cache of {qkv.dtype} like qkv, got {k.dtype} and {v.dtype}")
    positions = positions.astype(jnp.int32)
    if resolve(implementation) == "gpu":
        if reason := unfit_heads(heads):
            raise ValueError(f"decode_attention: {reason}")
        from pallas_kernels.decode_attention import gpu  # Pallas is slow to import and absent from some builds

        return gpu.decode_attention(
            qkv, k, v, positions, cos, sin, heads=heads, q_norm=q_norm, k_norm=k_norm, sinks=sinks, config=config,
            interpret=interpret,
        )  # fmt: skip
    return reference.decode_attention(
        qkv, k, v, positions, cos, sin, heads=heads, q_norm=q_norm, k_norm=k_norm, sinks=sinks
    )
