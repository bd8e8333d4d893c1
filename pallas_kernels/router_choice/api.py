"""The public function of the decode step's routing."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.backend import Implementation, resolve
from pallas_kernels.router_choice import reference
from pallas_kernels.router_choice.config import Choice, Recorded, unfit_choice


def router_choice(
    logits: Float32[Array, "B E"],
    active: Bool[Array, " B"],
    *,
    choice: Choice,
    bias: Float[Array, " E"] | None = None,
    correction: Float32[Array, " E"] | None = None,
    recorded: Recorded | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Int32[Array, "B K"], Float32[Array, "B K"]]:
    """Experts of every token, best first, and their weights; on GPUs in one launch.

    The lowest index wins among equal scores.

    Args:
      logits: the router's, of every expert.
      active: experts are -1 for tokens that are not.
      choice: how scores and weights follow from logits.
      bias: added to the logits.
      correction: added to the scores for choosing, not for weighing.
      recorded: routing that replaces the choice.
      implementation: `xla` or `gpu`; by default the best of this process's backend. There is none for TPUs: `tpu` means
        `xla`.
      interpret: run the kernel in the interpreter, on any backend.

    Raises `ValueError` for more experts than the kernel takes.
    """
    if resolve(implementation) == "gpu":
        if reason := unfit_choice(logits.shape[1], choice.top_k):
            raise ValueError(f"router_choice: {reason}")
        from pallas_kernels.router_choice import gpu  # Pallas is slow to import and absent from some builds

        return gpu.router_choice(
            logits, active, choice=choice, bias=bias, correction=correction, recorded=recorded, interpret=interpret
        )
    return reference.router_choice(logits, active, choice=choice, bias=bias, correction=correction, recorded=recorded)
