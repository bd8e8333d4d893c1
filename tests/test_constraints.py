"""Held to JSON or to a schema, whatever is drawn from the allowed tokens is of that form."""

import json
from pathlib import Path

import numpy as np
import pytest

import seqmoe_jax
from seqmoe_jax.errors import ConfigError, PromptError
from seqmoe_jax.text.tiktoken import TiktokenTokenizer
from seqmoe_jax.text.tokenizers import ByteTokenizer, FileTokenizer

pytest.importorskip("llguidance")
from seqmoe_jax.text.constraints import MOST_SCHEMA, Constraints

DEMO = Path(seqmoe_jax.__file__).parent / "demo"
O200K = Path(__file__).parent / "data" / "o200k_base-2000.tiktoken"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def demo():
    tokenizer = FileTokenizer(DEMO, "qwen3_moe")
    return tokenizer, tokenizer.vocab + 37, 0


def o200k():
    tokenizer = TiktokenTokenizer(O200K, family="gpt_oss")
    return tokenizer, tokenizer.vocab, tokenizer.encode("<|return|>")[0]


@pytest.fixture(scope="module", params=[demo, o200k])
def held(request):
    tokenizer, vocab, end = request.param()
    return tokenizer, vocab, end, Constraints(tokenizer, vocab=vocab, eos_token_ids=[end])


def allowed(constraint, vocab):
    return np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")[:vocab])


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_drawn_is_of_the_schema(held, seed):
    tokenizer, vocab, end, constraints = held
    constraint, dice, tokens = constraints.of_json(SCHEMA), np.random.default_rng(seed), []
    for _ in range(300):
        choice = allowed(constraint, vocab)
        assert (end in choice) == constraint.whole
        assert choice.max() < tokenizer.vocab
        token = int(dice.choice(choice))
        constraint.push(token)
        if token == end:
            break
        tokens.append(token)
    answer = json.loads(tokenizer.decode(tokens))
    assert answer["city"] in ("Rome", "Oslo")
    assert 1 <= answer["days"] <= 14


def test_what_is_of_the_form_may_be_said_and_nothing_else(held):
    tokenizer, vocab, _, constraints = held
    constraint = constraints.of_json()
    for token in tokenizer.encode('{"a": [1, "\u00e9"]}', add_special_tokens=False):
        assert token in allowed(constraint, vocab)
        assert not constraint.whole
        constraint.push(token)
    assert constraint.whole
    for bad in tokenizer.encode("x", add_special_tokens=False):
        with pytest.raises(PromptError, match="left the form"):
            constraint.push(bad)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "banana"}, "cannot be held to this JSON schema"),
        ({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}, "cannot be held"),
        ({"allOf": [{"type": "string", "pattern": f".*{n}.{{0,50}}x"} for n in range(9)]}, "cannot be held"),
        ({"allOf": [{"type": "string", "pattern": f".*{n}.{{0,50}}x"} for n in range(40)]}, "10 different .*, got 40"),
        ({"description": "x" * MOST_SCHEMA}, "may have 65,536 characters"),
    ],
)
def test_a_schema_that_cannot_be_held_is_one_line(held, schema, words):
    with pytest.raises(PromptError, match=words):
        held[3].of_json(schema)


def test_a_model_without_what_it_takes_is_refused():
    with pytest.raises(ConfigError, match="own tokenizer, got ByteTokenizer"):
        Constraints(ByteTokenizer(vocab=256), vocab=256, eos_token_ids=[0])
    with pytest.raises(ConfigError, match="end token"):
        Constraints(ByteTokenizer(vocab=256), vocab=256, eos_token_ids=[])
