"""Prompt ids, chats, end tokens and sampling of every directory are those of transformers, or it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")

from directories import DIFFERENT, EQUAL, REFUSED, UNREADABLE, Variant, Verdict, counted, sampled  # noqa: E402
from variants_text import variants, write_base  # noqa: E402

from seqmoe_jax.errors import SeqMoEError  # noqa: E402
from seqmoe_jax.text import TextStream, chat_of, eos_token_ids, model_sampling, open_tokenizer  # noqa: E402
from seqmoe_jax.text.harmony import EOS_TOKEN_IDS  # noqa: E402
from seqmoe_jax.text.template import read_templates  # noqa: E402

transformers.utils.logging.set_verbosity(transformers.logging.CRITICAL)
TEXTS = (
    "Once upon a time", " fox", "a  b", "<s>fox</s>", "naïve 日本🤗 e\u0301", "x<tool> y", "\nfox\t\n\n x",
    "fox </s> dog", "<|im_start|>user\nhi <|im_end|> <|endoftext|>", "don't I'LL 12345 ก็ดี", "<extra> a <extra2>b",
    "\uff21\uff42\uff43 \ufb01", "", " ", "\u2028x\u0085y\u00a0z",
)  # fmt: skip
CHATS = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": 'é "<b>"\n'},
     {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "<|im_end|> and?"}],
)  # fmt: skip
SAMPLED = 60


def theirs(directory: Path) -> dict[str, object]:
    """What transformers makes of a directory. A part that it refuses is the exception's name."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    encoded = [list(tokenizer(text, add_special_tokens=add)["input_ids"]) for text in TEXTS for add in (True, False)]
    chats = []
    for chat in CHATS:
        try:
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            chats.append((text, list(tokenizer(text, add_special_tokens=False)["input_ids"])))
        except Exception:
            chats.append(None)
    if (directory / "generation_config.json").exists():
        generation = transformers.GenerationConfig.from_pretrained(directory)
    else:
        generation = transformers.GenerationConfig.from_pretrained(
            directory, config_file_name="config.json", _from_model_config=True
        )  # as `from_pretrained` of a model has it
    ends = generation.eos_token_id
    chosen = {**generation._get_default_generation_params()}
    chosen |= {name: value for name, value in generation.to_dict().items() if value is not None}
    names = ("temperature", "top_k", "top_p")
    drawn = {**{name: chosen[name] for name in names}, "min_p": chosen.get("min_p", 0)} if chosen["do_sample"] else {}
    return {
        "ids": encoded,
        "text": [tokenizer.decode(ids, skip_special_tokens=True) for ids in encoded],
        "chats": chats,
        "ends": [] if ends is None else ends if isinstance(ends, list) else [ends],
        "sampling": drawn,
    }


def ours(directory: Path, family: str) -> dict[str, object]:
    tokenizer = open_tokenizer(directory, family)
    encoded = [tokenizer.encode(text, add_special_tokens=add) for text in TEXTS for add in (True, False)]
    chat, chats = chat_of(directory, family) if read_templates(directory) else None, []
    for messages in CHATS:
        try:
            text = None if chat is None else chat.render(messages)
        except SeqMoEError:
            text = None
        chats.append(None if text is None else (text, tokenizer.encode(text, add_special_tokens=False)))
    known = EOS_TOKEN_IDS if family == "gpt_oss" else ()  # more than the files say, by design
    sampling = model_sampling(directory)
    drawn = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return {
        "ids": encoded,
        "text": [tokenizer.decode(ids) for ids in encoded],
        "chats": chats,
        "ends": [end for end in eos_token_ids(directory, family) if end not in known],
        "sampling": {} if sampling.greedy else drawn,
    }


def compare(variant: Variant, directory: Path) -> Verdict:
    variant.make(write_base(variant.family, directory / "base"), directory / "variant")
    try:
        expected = theirs(directory / "variant")
    except Exception as error:
        return Verdict(variant=str(variant), kind=UNREADABLE, reason=str(error))
    try:
        got = ours(directory / "variant", variant.family)
    except SeqMoEError as error:
        reason = str(error)
        return Verdict(variant=str(variant), kind=REFUSED if "\n" not in reason else DIFFERENT, reason=reason)
    different = {name: (expected[name], got[name]) for name in expected if expected[name] != got[name]}
    return Verdict(variant=str(variant), kind=DIFFERENT if different else EQUAL, reason=str(different))


def none_is_different(chosen: list[Variant], directory: Path) -> list[Verdict]:
    verdicts = [compare(variant, directory / str(at)) for at, variant in enumerate(chosen)]
    print("\n".join(counted(verdicts)))
    assert [verdict for verdict in verdicts if verdict.kind == DIFFERENT] == []
    return verdicts


def test_a_sample_of_directories_is_read_as_transformers_reads_it(tmp_path):
    verdicts = none_is_different(sampled(variants(), SAMPLED), tmp_path)
    assert sum(verdict.kind == EQUAL for verdict in verdicts) > 0.6 * SAMPLED


@pytest.mark.slow
def test_every_directory_is_read_as_transformers_reads_it(tmp_path):
    none_is_different(list(variants()), tmp_path)


def test_text_as_it_comes_is_the_text_of_the_whole(tmp_path):
    """Of sentencepiece and byte-level tokenizers, special tokens and broken UTF-8 in between."""
    for at, variant in enumerate(v for v in sampled(variants(), 60) if v.axis in ("tokenizer.json", "tokenizer.model")):
        directory = variant.make(write_base(variant.family, tmp_path / f"{at}b"), tmp_path / f"{at}v")
        try:
            tokenizer = open_tokenizer(directory, variant.family)
        except SeqMoEError:
            continue
        for text in TEXTS:
            ids = tokenizer.encode(text)
            # The library shows no byte of a row that is broken anywhere, those before the break either.
            for tokens in (ids, ids[::-1]) if variant.axis == "tokenizer.json" else (ids,):
                stream = TextStream(tokenizer=tokenizer)
                assert "".join([*map(stream.push, tokens), stream.close()]) == tokenizer.decode(tokens), str(variant)
