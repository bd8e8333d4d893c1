"""The public function of Sinkhorn and Knopp's iteration."""

from __future__ import annotations

from jaxtyping import Array, Float32

from pallas_kernels.backend import Implementation, resolve
from pallas_kernels.sinkhorn import reference


def sinkhorn(
    logits: Float32[Array, "N S S"],
    *,
    iterations: int,
    eps: float,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float32[Array, "N S S"]:
    """The softmax of every row, then columns and rows divided by their sums in turn; on GPUs in one launch.

    In plain XLA the iteration is a loop of several launches, which no CUDA graph holds.

    Args:
      logits: N matrices; the kernel takes those whose S is a power of two, others are computed by XLA.
      iterations: how often columns are divided; rows one time less.
      eps: added to the softmax and to every divisor.
      implementation: `xla` or `gpu`; by default the best of this process's backend. There is none for TPUs: `tpu` means
        `xla`.
      interpret: run the kernel in the interpreter, on any backend.
    """
    size = logits.shape[-1]
    if resolve(implementation) == "gpu" and size & (size - 1) == 0:
        from pallas_kernels.sinkhorn import gpu  # Pallas is slow to import and absent from some builds

        return gpu.sinkhorn(logits, iterations=iterations, eps=eps, interpret=interpret)
    return reference.sinkhorn(logits, iterations=iterations, eps=eps)
