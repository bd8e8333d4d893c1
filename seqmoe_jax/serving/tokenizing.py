"""`/tokenize` and `/detokenize`, in the form of vLLM's server."""

from __future__ import annotations

from typing import Any

from seqmoe_jax.api import Engine
from seqmoe_jax.errors import SeqMoEError
from seqmoe_jax.serving.fields import read_rows
from seqmoe_jax.serving.kinds import Field
from seqmoe_jax.serving.lengths import check_text_length
from seqmoe_jax.serving.query import conversation
from seqmoe_jax.serving.refusal import Refusal
from seqmoe_jax.serving.table import DETOKENIZE, TOKENIZE
from seqmoe_jax.text import encode_prompt


def tokenize(body: Any, engine: Engine) -> dict[str, Any]:
    """The tokens of a `prompt` or of a conversation as the model is given it. Raises `Refusal`."""
    given = _read(body, TOKENIZE)
    if ("prompt" in given) == ("messages" in given):
        raise Refusal("give either prompt or messages", param="prompt")
    if "messages" in given:
        tokens = conversation(given, engine).tokens
    else:
        check_text_length("prompt", given["prompt"], engine)
        try:
            tokens = encode_prompt(
                engine.tokenizer, given["prompt"], add_special_tokens=given.get("add_special_tokens", True)
            )
        except SeqMoEError as error:
            raise Refusal(str(error), param="prompt") from None
    return {"count": len(tokens), "max_model_len": engine.token_engine.context, "tokens": tokens, "token_strs": None}


def detokenize(body: Any, engine: Engine) -> dict[str, Any]:
    """The text of `tokens`, special ones left out. Raises `Refusal`."""
    given = _read(body, DETOKENIZE)
    if (tokens := given.get("tokens")) is None:
        raise Refusal("tokens is missing: give a list of token ids", param="tokens")
    vocabulary = engine.token_engine.model.spec.vocab
    if not all(0 <= token < vocabulary for token in tokens):
        raise Refusal(f"tokens has a token id outside of the vocabulary of {vocabulary}", param="tokens")
    return {"prompt": engine.tokenizer.decode(tokens)}


def _read(body: Any, rows: tuple[Field, ...]) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise Refusal("the body must be a JSON object")
    return read_rows(body, rows)
