"""The public function of the decode kernel."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.backend import Implementation, resolve
from pallas_kernels.fused_moe import reference
from pallas_kernels.fused_moe.config import Config
from pallas_kernels.layout import ExpertLayout


def fused_moe(
    x: Float[Array, "B H"],
    slots: Shaped[Array, "S n"],
    slot_ids: Int[Array, "B K"],
    weights: Float[Array, "B K"],
    *,
    layout: ExpertLayout,
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: Config | None = None,
) -> Float32[Array, "B H"]:
    """MoE layer of a decode step: `out[b] = sum_k weights[b, k] * down @ (silu(gate @ x[b]) * (up @ x[b]))`.

    That is of plain experts: the layout may give each product a bias, and another activation.

    Args:
      x: bf16 or f32.
      slots: the slot cache, one expert block of `layout` per row.
      slot_ids: slot of each route's expert; -1 for an inactive route, which contributes nothing.
      weights: router weights, used as they come (no normalisation), in float32.
      layout: where gate, up and down, their scales and biases lie in a block; bf16, f16, f32, FP8 e4m3 with a scale
        per 128 x 128 block, or MXFP4; and the activation between them.
      implementation: `xla`, `gpu` or `tpu`; by default the best of this process's backend.
      interpret: run a Pallas implementation in the interpreter, on any backend.
      config: block shapes of the GPU kernels; by default chosen from the expert's shape.

    Sums are float32. With bf16 `x` the value `silu(g) * u` is rounded to bf16 before the down projection, as
    in Hugging Face's models; with float32 nothing is rounded. Sums are taken in an order
    that is fixed, though each implementation has its own. The result does not depend on which slots the experts
    sit in, to the bit.
    """
    hidden = layout.hidden
    if x.shape[1] != hidden or slots.shape[1] != layout.block_elems or slots.dtype != layout.storage:
        raise ValueError(
            f"fused_moe: layout expects x[B, {hidden}] and slots {layout.storage}[S, {layout.block_elems}], "
            f"got x{list(x.shape)} and slots {slots.dtype}{list(slots.shape)}"
        )
    match resolve(implementation):
        case "gpu":
            from pallas_kernels.fused_moe import gpu

            return gpu.fused_moe(x, slots, slot_ids, weights, layout=layout, config=config, interpret=interpret)
        case "tpu":
            from pallas_kernels.fused_moe import tpu

            return tpu.fused_moe(x, slots, slot_ids, weights, layout=layout, interpret=interpret)
        case _:
            return reference.fused_moe(x, slots, slot_ids, weights, layout=layout)
