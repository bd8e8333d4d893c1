"""Text comes out as it is decided: whole characters, nothing of a stop string, nothing lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmoe_jax.errors import CheckpointError, ConfigError, PromptError
from seqmoe_jax.text import ByteTokenizer, FileTokenizer, TextStream, encode_prompt, eos_token_ids

BYTES = ByteTokenizer(vocab=256)


def stream(text, stop=()):
    out = TextStream(tokenizer=BYTES, stop=tuple(stop))
    pieces = []
    for token in BYTES.encode(text):
        pieces.append(out.push(token))
        if out.finished:
            break
    pieces.append(out.close())
    assert out.text == "".join(pieces)
    return pieces


@given(st.text())
def test_pieces_join_to_the_text_and_are_whole_characters(text):
    pieces = stream(text)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text, stops):
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    out = "".join(stream(text, stops))
    if not found:
        assert out == text
    else:
        # The stop that is complete first ends the text; of those complete at once, the one that starts first.
        end = min(found)[0]
        assert out == text[: min(start for e, start in found if e == end)]


@given(st.text("ab", min_size=1), st.text("ab", min_size=1, max_size=3))
def test_no_piece_shows_part_of_a_stop_string(text, stop):
    shown = ""
    for piece in stream(text, [stop]):
        shown += piece
        assert stop not in shown


def test_end_tokens_come_from_either_file(tmp_path):
    assert eos_token_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert eos_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert eos_token_ids(tmp_path) == (1, 2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(ConfigError, match="eos_token_id"):
        eos_token_ids(tmp_path)


def test_a_missing_or_broken_tokenizer_is_said_in_one_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        FileTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as error:
        FileTokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_empty_and_foreign_prompts_are_refused():
    with pytest.raises(PromptError, match="empty"):
        encode_prompt(BYTES, "")
    with pytest.raises(PromptError, match="string"):
        encode_prompt(BYTES, 3)
