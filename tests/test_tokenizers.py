"""Every tokenizer format gives its text back, knows its special tokens, and says what is wrong with its file."""

import json
import shutil
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import seqmoe_jax
from seqmoe_jax.errors import CheckpointError, ConfigError, PromptError
from seqmoe_jax.text import FileTokenizer, TextStream, encode_prompt, open_tokenizer, tokenizer_files
from seqmoe_jax.text.tiktoken import TiktokenTokenizer

DATA = Path(__file__).parent / "data"
DEMO = Path(seqmoe_jax.__file__).parent / "demo"
QWEN, O200K = DATA / "qwen3_6-2000.tiktoken", DATA / "o200k_base-2000.tiktoken"


@lru_cache
def harmony_tokenizer():
    pytest.importorskip("tiktoken")
    return TiktokenTokenizer(O200K, family="gpt_oss")


@pytest.fixture(scope="module")
def qwen():
    pytest.importorskip("tiktoken")
    return TiktokenTokenizer(QWEN, family="qwen3_5_moe")


@pytest.fixture(scope="module")
def o200k():
    return harmony_tokenizer()


@pytest.fixture(scope="module")
def piece_file(tmp_path_factory):
    """A sentencepiece model trained here on a few sentences, with bytes for what it does not know."""
    sentencepiece = pytest.importorskip("sentencepiece")
    directory = tmp_path_factory.mktemp("pieces")
    corpus = directory / "corpus.txt"
    corpus.write_text("Once upon a time there was a fox.\nThe quick brown fox jumps over the lazy dog.\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(directory / "tokenizer"), vocab_size=320, model_type="bpe",
        byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return directory / "tokenizer.model"


# The names of special tokens become those tokens, which are no text.
@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<|" not in text))
def test_harmony_gives_the_text_back(text):
    assert harmony_tokenizer().decode(harmony_tokenizer().encode(text)) == text


def test_special_tokens_follow_the_ranks(qwen, o200k):
    assert qwen.encode("<|im_start|>user\n<|im_end|>")[0] == 2001
    assert qwen.vocab == 2000 + 33
    assert [o200k.encode(f"<|{name}|>") for name in ("return", "channel", "start", "call")] == [
        [2004], [2007], [2008], [2014]
    ]  # fmt: skip
    assert o200k.vocab == 2000 + 21  # of the whole file 200,019: <|return|> is 200002


def test_special_tokens_are_left_out_of_text_but_thoughts_are_not(qwen):
    ids = qwen.encode("<|im_start|>assistant\n<think>\nhm</think>\n\nyes<|im_end|>")
    assert qwen.decode(ids) == "assistant\n<think>\nhm</think>\n\nyes"


def test_qwen_normalises_and_keeps_marks_with_letters(qwen):
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9")
    older = TiktokenTokenizer(QWEN, family="qwen3_moe")
    assert older.vocab == 2000 + 26
    text = "ก็ดี"  # a consonant with a mark
    assert older.decode(older.encode(text)) == qwen.decode(qwen.encode(text)) == text


def test_added_tokens_of_the_configuration_count(tmp_path, o200k):
    shutil.copy(O200K, tmp_path / "o200k.tiktoken")
    added = {"2030": {"content": "<extra>", "special": False}, "2031": {"content": "<hidden>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = open_tokenizer(tmp_path, "gpt_oss")
    assert tokenizer.vocab == 2032
    assert tokenizer.encode("a<extra><hidden>")[1:] == [2030, 2031]
    assert tokenizer.decode(tokenizer.encode("a<extra><hidden>")) == "a<extra>"


def test_a_family_whose_splitting_is_unknown_is_refused(tmp_path):
    shutil.copy(QWEN, tmp_path / "some.tiktoken")
    with pytest.raises(ConfigError, match=r"'mixtral'.*tokenizer\.json"):
        open_tokenizer(tmp_path, "mixtral")


def test_damaged_ranks_are_one_line(tmp_path):
    path = tmp_path / "qwen.tiktoken"
    for content in (b"not base64 at all\n", QWEN.read_bytes()[:300], b"IQ== x\n"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"qwen\.tiktoken: expected a tokenizer") as error:
            open_tokenizer(tmp_path, "qwen3_moe")
        assert "\n" not in str(error.value)


def pieces(directory, piece_file, **config):
    shutil.copy(piece_file, directory / "tokenizer.model")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return open_tokenizer(directory, "gpt_oss")


def test_sentencepiece_gives_the_text_back(piece_file, tmp_path):
    plain = pieces(tmp_path, piece_file)
    for text in ("Once upon a time", "naïve 日本語 🤗", "a  b", " x"):
        assert plain.decode(plain.encode(text)) == text
    tokenizer = pieces(tmp_path, piece_file, add_bos_token=True, add_eos_token=True)
    assert tokenizer.encode("fox") == [1, *plain.encode("fox"), 2]
    assert tokenizer.encode("fox", add_special_tokens=False) == plain.encode("fox")


def test_sentencepiece_puts_a_space_before_words_where_its_class_does(piece_file, tmp_path):
    plain = pieces(tmp_path, piece_file)
    first = pieces(tmp_path, piece_file, tokenizer_class="LlamaTokenizer", legacy=False)
    always = pieces(tmp_path, piece_file, tokenizer_class="LlamaTokenizer", legacy=True)
    never = pieces(tmp_path, piece_file, tokenizer_class="LlamaTokenizer", add_prefix_space=False)
    assert first.encode("fox") == always.encode("fox") == plain.encode(" fox")
    assert never.encode("fox") == plain.encode("fox")
    assert first.encode("</s>fox") == [2, *plain.encode("fox")]
    assert always.encode("</s>fox") == [2, *plain.encode(" fox")]
    assert first.decode(first.encode("fox")) == "fox"


def test_sentencepiece_takes_control_tokens_by_name(piece_file, tmp_path):
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": 400, "<hidden>": 401}))
    tokenizer = pieces(tmp_path, piece_file, extra_special_tokens=["<hidden>"])
    ids = tokenizer.encode("<s>fox</s><tool><hidden>")
    assert (ids[0], ids[-3:]) == (1, [2, tokenizer.vocab - 2, tokenizer.vocab - 1])
    assert tokenizer.decode(ids) == "fox<tool>"


def test_a_continuation_keeps_the_space_before_its_first_word(piece_file, tmp_path):
    """Decoded alone, a first word loses its space."""
    tokenizer = pieces(tmp_path, piece_file, tokenizer_class="LlamaTokenizer")
    prompt, whole = tokenizer.encode("Once upon"), tokenizer.encode("Once upon a time 日")
    stream = TextStream(tokenizer=tokenizer, context=prompt)
    assert "".join([*map(stream.push, whole[len(prompt) :]), stream.close()]) == " a time 日"


def test_a_row_of_characters_in_bytes_streams_as_it_is(piece_file, tmp_path):
    tokenizer = pieces(tmp_path, piece_file)
    prompt, text = "日本語日本語日本", "語🤗日本語日本語日本語日本語"
    for before in ("", prompt):
        context, ids = tokenizer.encode(before), tokenizer.encode(text)
        stream = TextStream(tokenizer=tokenizer, context=context)
        assert "".join([*map(stream.push, ids), stream.close()]) == text


def test_a_damaged_sentencepiece_file_is_one_line(tmp_path):
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x05junk")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: expected a tokenizer"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(("name", "package"), [("x.tiktoken", "tiktoken"), ("tokenizer.model", "sentencepiece")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, name, package):
    def gone(wanted):
        raise ImportError(wanted)

    monkeypatch.setattr(tokenizer_files, "import_module", gone)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"{package}.*\[tokenizers-extra\]"):
        open_tokenizer(tmp_path, "qwen3_moe")


def beside(directory, **files):
    """The demo's tokenizer with other files beside it."""
    shutil.copy(DEMO / "tokenizer.json", directory)
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return FileTokenizer(directory)


def test_tokens_that_stand_only_in_side_files_are_tokens(tmp_path):
    vocab = FileTokenizer(DEMO).vocab
    for files in (
        {"added_tokens": {"<extra>": vocab}},
        {"added_tokens": {"<extra>": 9999}},  # there is no gap in a vocabulary
        {"tokenizer_config": {"added_tokens_decoder": {"9999": {"content": "<extra>"}}}},
        {"tokenizer_config": {"additional_special_tokens": ["<extra>"]}},
        {"tokenizer_config": {"pad_token": "<extra>"}},
        {"tokenizer_config": {"image_token": "<extra>"}},
        {"special_tokens_map": {"bos_token": {"content": "<extra>"}}},
        {"special_tokens_map": {"additional_special_tokens": ["<extra>"]}},
    ):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        tokenizer = beside(directory, **files)
        assert tokenizer.encode("a<extra>")[1:] == [vocab], files
        hidden = "added_tokens" not in files and "added_tokens_decoder" not in str(files)
        assert tokenizer.decode(tokenizer.encode("a<extra>b")) == ("ab" if hidden else "a<extra>b")
        assert tokenizer.vocab == vocab + 1


def test_the_newer_file_says_what_a_token_is(tmp_path):
    listed = {"0": {"content": "<|endoftext|>", "special": True, "rstrip": True}}
    tokenizer = beside(tmp_path, tokenizer_config={"added_tokens_decoder": listed}, added_tokens={"<extra>": 7000})
    assert tokenizer.encode("<|endoftext|>  a") == [0, *FileTokenizer(DEMO).encode("a")]
    assert len(tokenizer.encode("<extra>")) > 1


def test_a_class_that_has_its_own_pipeline_counts(tmp_path):
    directory = tmp_path / "qwen"
    directory.mkdir()
    content = json.loads((DEMO / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(content | {"normalizer": {"type": "Lowercase"}}))
    as_file = FileTokenizer(directory, "mixtral")
    as_class = FileTokenizer(directory, "qwen3_moe")
    assert as_file.decode(as_file.encode("ABC e\u0301")) == "abc e\u0301"
    assert as_class.decode(as_class.encode("ABC e\u0301")) == "ABC \u00e9"
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert FileTokenizer(directory, "qwen3_moe").encode("ABC") == as_file.encode("ABC")
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer"}))
    with pytest.raises(ConfigError, match="'T5Tokenizer' is not supported for qwen3_moe"):
        FileTokenizer(directory, "qwen3_moe")


@pytest.mark.parametrize(
    "config",
    [
        {"fix_mistral_regex": True},
        {"fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.json"]},
        {"clean_up_tokenization_spaces": True,
         "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True},
        {"bos_token": 3},
        {"added_tokens_decoder": {"x": {}}},
        {"added_tokens_decoder": []},
        {"extra_special_tokens": [7]},
    ],
)  # fmt: skip
def test_what_a_tokenizer_config_asks_for_in_vain_is_refused(tmp_path, config):
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json") as error:
        beside(tmp_path, tokenizer_config=config)
    assert "\n" not in str(error.value)


def test_long_texts_have_the_tokens_of_short_ones():
    text = "def fibonacci(n):\n    return n  # 日本\n" * 400
    tokenizer = FileTokenizer(DEMO)
    lines = [token for line in text.splitlines(keepends=True) for token in tokenizer.encode(line)]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == pytest.approx(len(lines), rel=0.1)


@pytest.mark.parametrize(
    "training",
    [
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
        {"truncation": {"direction": "Left", "max_length": 4, "strategy": "OnlyFirst", "stride": 0}},
        {"padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                     "pad_type_id": 0, "pad_token": "<|endoftext|>"}},
        {"padding": {"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": 64, "pad_id": 0,
                     "pad_type_id": 0, "pad_token": "<|endoftext|>"}},
    ],
)  # fmt: skip
def test_what_the_file_says_for_training_changes_no_prompt(tmp_path, training):
    content = json.loads((DEMO / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | training))
    text = "def fibonacci(n):\n    return n  # 日本"
    assert FileTokenizer(tmp_path).encode(text) == FileTokenizer(DEMO).encode(text)


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(PromptError, match="surrogate"):
        encode_prompt(open_tokenizer(DEMO), "a\ud800")
