"""Eviction policies: which resident expert goes when a missing one needs its slot.

Every policy is a rule for int32 slot scores; the lowest score is evicted, the lowest slot index on a tie.
"""

from __future__ import annotations

from typing import Literal

from pallas_kernels.slot_update import Rule
from seqmoe_jax.options import Policy as Policy
from seqmoe_jax.options import check_policy as check_policy

POLICIES: dict[Policy, str] = {
    "seqmoe": "evict what the forecast needs least",
    "lru": "evict the least recently used",
    "lfu": "evict the least often used since it was loaded",
    "prefill-hot": "keep what the prompt used most, fixed while decoding; load the rest on demand",
    "full": "keep what was resident after loading, fixed; everything at residency 1.0",
}

# Policies other than lru and lfu score keys, not uses: the score of a key is set outside the layer loop.
_RULES: dict[Policy, Rule] = {"lru": "lru", "lfu": "lfu"}


PromptRule = Literal["none", "share", "count"]

# What the scores of keys make of a prompt: of the shares of its tokens that used them, or of their counts alone.
_PROMPT_RULES: dict[Policy, PromptRule] = {"seqmoe": "share", "prefill-hot": "count"}


def prompt_rule_of(policy: Policy) -> PromptRule:
    """How a prompt changes the scores of keys under this policy."""
    return _PROMPT_RULES.get(policy, "none")


def rule_of(policy: Policy) -> Rule:
    """How `slot_update` changes scores under this policy."""
    return _RULES.get(policy, "scored")
