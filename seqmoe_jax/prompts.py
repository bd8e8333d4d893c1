"""What may be asked of an engine: prompts that its model, its context and its slots can hold."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from seqmoe_jax.errors import PromptError, ResidencyError
from seqmoe_jax.memory.plan import least_slots
from seqmoe_jax.models.spec import ModelSpec
from seqmoe_jax.options import MAX_BATCH


def check_prompts(
    prompts: Sequence[Sequence[int]],
    new: Sequence[int],
    spec: ModelSpec,
    *,
    slots: int,
    context: int,
    max_batch: int,
) -> None:
    """Raises `PromptError` or `ResidencyError` where these prompts, with `new` tokens after each, cannot be run."""
    if not prompts:
        raise PromptError("expected at least one prompt, got an empty list")
    if len(prompts) > max_batch:
        advice = f"load with max_batch={len(prompts)}" if len(prompts) <= MAX_BATCH else f"{MAX_BATCH} is the most"
        raise PromptError(
            f"{len(prompts)} prompts at once, but this engine was loaded with max_batch={max_batch}; "
            f"give at most {max_batch} at a time ({advice})"
        )
    least = least_slots(spec, len(prompts))
    if slots < least:
        raise ResidencyError(
            f"{len(prompts)} sequences with K={spec.moe.top_k} need {least} slots, this engine has {slots}; "
            "load with a higher residency or give fewer prompts"
        )
    for index, (prompt, more) in enumerate(zip(prompts, new, strict=True)):
        if more < 1:
            raise PromptError(f"max_new_tokens must be at least 1, got {more}")
        if not prompt:
            raise PromptError(f"prompt {index} is empty: give at least one token")
        if len(prompt) + more > context:
            longer = f" or load with a context of up to {spec.context}" if context < spec.context else ""
            raise PromptError(
                f"prompt {index} has {len(prompt)} tokens and {more} new ones were asked for, "
                f"but the context is {context}; shorten the prompt, lower max_new_tokens{longer}"
            )
        if not all(isinstance(token, Integral) and 0 <= token < spec.vocab for token in prompt):
            raise PromptError(f"prompt {index} has a token id outside the vocabulary of {spec.vocab}")
