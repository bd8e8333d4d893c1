"""Answers held to JSON or to a JSON schema: which tokens may come next, by the library llguidance.

Nothing of the engine is here, and it does not ask yet: such an answer needs a decode step that takes a mask of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32

from seqmoe_jax.errors import ConfigError, PromptError
from seqmoe_jax.text.tiktoken import TiktokenTokenizer
from seqmoe_jax.text.tokenizers import FileTokenizer, Tokenizer

MOST_SCHEMA = 64 << 10  # characters of its JSON
MOST_PATTERNS = (
    10  # whose intersection takes the library a time exponential in their number: 14 took 0.7 s, 16 took 6 s
)
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Constraints:
    """Constraints for one model: `vocab` rows of its head, of which `eos_token_ids` end an answer. To make it takes a
    second for a vocabulary of 150,000. Raises `ConfigError`."""

    def __init__(self, tokenizer: Tokenizer, *, vocab: int, eos_token_ids: Sequence[int]):
        try:
            import llguidance
            from llguidance.tiktoken import lltokenizer_from_encoding
        except ModuleNotFoundError:
            raise ConfigError("answers held to a form need the package llguidance: pip install llguidance") from None
        if not eos_token_ids:
            raise ConfigError("answers held to a form need a model with an end token, this one has none")
        ends = list(eos_token_ids)
        if isinstance(tokenizer, FileTokenizer):
            self._tokenizer = llguidance.LLTokenizer(tokenizer.as_json(), n_vocab=vocab, eos_token=ends)
        elif isinstance(tokenizer, TiktokenTokenizer):
            self._tokenizer = lltokenizer_from_encoding(tokenizer.encoding, n_vocab=vocab, eos_token=ends)
        else:
            raise ConfigError(f"answers held to a form need a model's own tokenizer, got {type(tokenizer).__name__}")
        self._library = llguidance

    def of_json(self, schema: Mapping[str, Any] | None = None) -> Constraint:
        """An answer that is JSON: of a schema, else any object. Raises `PromptError` for a schema that is too large, or
        that says what cannot be held."""
        text = json.dumps(_ANY_OBJECT if schema is None else schema)
        if len(text) > MOST_SCHEMA:
            raise PromptError(f"a JSON schema may have {MOST_SCHEMA:,} characters, got {len(text):,}")
        if (count := len(_patterns(schema))) > MOST_PATTERNS:
            raise PromptError(f"a JSON schema may have {MOST_PATTERNS} different patterns and formats, got {count}")
        grammar = self._library.LLMatcher.grammar_from_json_schema(text)
        # Work that a schema may make, as the library counts it: tens of milliseconds while it is read and for a mask.
        limits = self._library.LLParserLimits(
            initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000, max_grammar_size=100_000
        )
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise PromptError(f"answers cannot be held to this JSON schema: {_first_line(matcher.get_error())}")
        return Constraint(matcher)


class Constraint:
    """The constraint of one sequence, in the state after the tokens that it was given."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def mask(self) -> UInt32[np.ndarray, "words"]:
        """A bit for each token, 32 to a word, lowest first: whether it may come next. The end tokens may where the
        answer is whole; where it cannot go on, nothing else may. Raises `PromptError` where a limit was reached."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), "<u4")
        self._check()
        return mask

    def push(self, token: int) -> None:
        """The token that came next. Raises `PromptError` for one that may not."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def whole(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise PromptError(f"the answer left the form that it is held to: {_first_line(self._matcher.get_error())}")


def _patterns(schema: Any) -> set[str]:
    """The regular expressions and formats of strings anywhere in a schema."""
    found, rest = set[str](), [schema]
    while rest:
        value = rest.pop()
        if isinstance(value, Mapping):
            found |= {value[name] for name in ("pattern", "format") if isinstance(value.get(name), str)}
            found |= value["patternProperties"].keys() if isinstance(value.get("patternProperties"), Mapping) else set()
            rest += value.values()
        elif isinstance(value, list):
            rest += value
    return found


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
