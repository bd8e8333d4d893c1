"""The public function of the prefill kernel."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels.backend import Implementation, resolve
from pallas_kernels.grouped_moe import reference
from pallas_kernels.grouped_moe.config import GroupedMoEConfig
from pallas_kernels.layout import ExpertLayout


def grouped_moe(
    out: Float32[Array, "N M H"],
    x: Float[Array, "T H"],
    slots: Shaped[Array, "S n"],
    block_slots: Int[Array, " N"],
    block_rows: Int[Array, "N M"],
    *,
    layout: ExpertLayout,
    implementation: Implementation | None = None,
    interpret: bool = False,
    config: GroupedMoEConfig | None = None,
) -> Float32[Array, "N M H"]:
    """Unweighted expert outputs: `out[n, m] = expert(block_slots[n])(x[block_rows[n, m]])`.

    Args:
      out: where the results go; donate it, and it is updated in place. M is 16 or 64.
      x: bf16 or f32.
      slots: the slot cache, one expert block of `layout` per row.
      block_slots: slot of each block's expert; -1 leaves `out[n]` as it is.
      block_rows: token of each row; -1 for padding, whose result is zero.
      layout: where gate, up and down, their scales and biases lie in a block; bf16, f16, f32, FP8 e4m3 with a scale
        per 128 x 128 block, or MXFP4; and the activation between them.
      implementation: `xla`, `gpu` or `tpu`; by default the best of this process's backend.
      interpret: run a Pallas implementation in the interpreter, on any backend.
      config: tiles of the GPU kernels; by default chosen from the expert's shape.

    Arithmetic is that of `fused_moe`. A row's result depends neither on the position of its block nor on
    which blocks are processed: a layer's experts may be split into several calls with equal results to the
    bit. `assign_blocks` makes the blocks, `combine` sums their results.
    """
    hidden = layout.hidden
    if x.shape[1] != hidden or slots.shape[1] != layout.block_elems or slots.dtype != layout.storage:
        raise ValueError(
            f"grouped_moe: expected x[T, {hidden}] and slots {layout.storage}[S, {layout.block_elems}], "
            f"got x{list(x.shape)} and slots {slots.dtype}{list(slots.shape)}"
        )
    args = out, x, slots, block_slots, block_rows
    match resolve(implementation):
        case "gpu":
            from pallas_kernels.grouped_moe import gpu

            return gpu.grouped_moe(*args, layout=layout, config=config, interpret=interpret)
        case "tpu":
            from pallas_kernels.grouped_moe import tpu

            return tpu.grouped_moe(*args, layout=layout, interpret=interpret)
        case _:
            return reference.grouped_moe(*args, layout=layout)
