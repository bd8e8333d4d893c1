"""Directories whose tokenizer files, templates, end tokens or sampling are written in all the ways that there are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from directories import Variant

import seqmoe_jax

FAMILIES = (
    "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "gpt_oss",
    "glm4_moe", "glm4_moe_lite", "granitemoe", "deepseek_v2", "deepseek_v3", "deepseek_v4",
)  # fmt: skip
DEMO = json.loads((Path(seqmoe_jax.__file__).parent / "demo" / "tokenizer.json").read_text())
TOKENIZER, CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
Files = dict[str, Any]  # what stands in a directory: objects as JSON, text as it is; None where a file goes


def token(content: str, **flags: bool) -> dict[str, Any]:
    names = ("single_word", "lstrip", "rstrip", "normalized")
    return {"content": content, **dict.fromkeys(names, False), "special": True, **flags}


FILES: dict[str, Files] = {  # of the tokenizer itself
    "truncation": {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
    "padding": {"padding": {"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                            "pad_type_id": 0, "pad_token": "<pad>"}},
    "NFKC": {"normalizer": {"type": "NFKC"}},
    "lower case": {"normalizer": {"type": "Lowercase"}},
    "prefix space": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                                       "use_regex": True}},
    "digits": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]}},
    "ignore merges": {"model": {**DEMO["model"], "ignore_merges": True}},
    "no merges": {"model": {**DEMO["model"], "merges": []}},
    "adds a beginning": {"post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}}},
}  # fmt: skip
BESIDE: dict[str, Files] = {
    "added_tokens.json": {"added_tokens.json": {"<extra>": 6145, "<extra2>": 6144}},
    "added_tokens.json with a gap": {"added_tokens.json": {"<extra>": 9999}},
    "added_tokens_decoder": {CONFIG: {"added_tokens_decoder": {
        "9999": token("<extra>"), "6144": token("<extra2>", special=False, normalized=True)}}},
    "added_tokens_decoder with other flags": {CONFIG: {"added_tokens_decoder": {
        "1": token("<|im_start|>", rstrip=True), "2": token("<|im_end|>", lstrip=True)}, "eos_token": "<|im_end|>"}},
    "added_tokens_decoder and older files": {
        CONFIG: {"added_tokens_decoder": {"300": token("<extra>")}}, "special_tokens_map.json": {"bos_token": "<tool>"},
        "added_tokens.json": {"<extra2>": 500}},
    "special_tokens_map.json": {"special_tokens_map.json": {
        "bos_token": "<extra>", "eos_token": token("<extra2>", lstrip=True),
        "additional_special_tokens": ["<tool>"]}},
    "special_tokens_map.json over the other": {
        CONFIG: {"bos_token": "<s>", "eos_token": "<|im_end|>"}, "special_tokens_map.json": {"bos_token": "<extra>"}},
    "special_tokens_map.json and added_tokens.json": {
        "special_tokens_map.json": {"bos_token": "<extra>", "additional_special_tokens": ["<extra2>"]},
        "added_tokens.json": {"<extra>": 6144, "<tool>": 6146, "<extra2>": 6145}},
    "additional_special_tokens": {CONFIG: {"additional_special_tokens": ["<extra>", "<|im_start|>", "<extra2>"]}},
    "extra_special_tokens": {CONFIG: {"extra_special_tokens": ["<extra>"]},
                             "special_tokens_map.json": {"additional_special_tokens": ["<tool>"]}},
    "extra_special_tokens by name": {CONFIG: {"extra_special_tokens": {"image_token": "<extra>"}}},
    "a name of its own": {CONFIG: {"image_token": "<extra>", "tool_token": "<tool>"}},
    "tokens as objects": {CONFIG: {"bos_token": {"__type": "AddedToken", **token("<extra>", rstrip=True)},
                                   "additional_special_tokens": [{"__type": "AddedToken", "content": "<tool>"}]}},
    "tokens that are null": {CONFIG: dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))},
    "tokens that are new": {CONFIG: {"eos_token": "</s>", "pad_token": "fox"}},
    "add_bos_token": {CONFIG: {"bos_token": "<s>", "eos_token": "<|im_end|>", "add_bos_token": True,
                               "add_eos_token": True}},
    "split_special_tokens": {CONFIG: {"split_special_tokens": True}},
    "clean_up_tokenization_spaces": {CONFIG: {"clean_up_tokenization_spaces": True}},
    "add_prefix_space": {CONFIG: {"add_prefix_space": True}},
    "model_max_length": {CONFIG: {"model_max_length": 3, "truncation_side": "left", "padding_side": "left"}},
    **{f"tokenizer_class {name}": {CONFIG: {"tokenizer_class": name}} for name in (
        "PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", "Qwen2TokenizerFast", "Qwen3_5Tokenizer",
        "GPTNeoXTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "T5Tokenizer", "MyTokenizer")},
}  # fmt: skip
PIECES: dict[str, Files] = {
    "alone": {},
    "add_bos_token": {CONFIG: {"add_bos_token": True}},
    "both ends": {CONFIG: {"add_bos_token": True, "add_eos_token": True, "eos_token": "<extra>"}},
    "legacy": {CONFIG: {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True}},
    "not legacy": {CONFIG: {"tokenizer_class": "LlamaTokenizer", "legacy": False}},
    "no prefix space": {CONFIG: {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}},
    "added_tokens.json": {"added_tokens.json": {"<extra>": 330}},
    "added_tokens_decoder": {CONFIG: {"added_tokens_decoder": {"3": token("<extra>"), "400": token("<extra2>")}}},
}
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}\n"
)
SPACED = (
    "  {%- set ns = namespace(n=0) -%}\n  {% for m in messages %}\n    {% if m.role == 'system' %}\n{% continue %}\n"
    "    {% endif %}\n    {% set ns.n = ns.n + 1 %}\n  {{ ns.n }}{{ m | tojson }}{{ m.content | tojson(indent=2) }}\n"
    "  {% generation %}{% set kept = 1 %}{{ m.content }}{% endgeneration %}{{ kept is defined }}\n  {% endfor %}\n"
)
CHANNEL = CHATML.replace("assistant\n{% endif", "assistant<think>{% endif")
REFUSING = "{% if messages[0].role != 'system' %}{{ raise_exception('a system message first') }}{% endif %}" + CHATML
SPECIALS = (
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ image_token }}|{{ tools is none }}" + CHATML
)
TEMPLATES: dict[str, Files] = {
    **{f"in the file: {name}": {"chat_template.jinja": text} for name, text in (
        ("ChatML", CHATML), ("spaces", SPACED), ("opens a thought", CHANNEL), ("refuses", REFUSING),
        ("specials", SPECIALS))},
    "in the config": {CONFIG: {"chat_template": CHATML, "eos_token": "<|im_end|>"}},
    "specials in the config": {CONFIG: {"chat_template": SPECIALS, "image_token": "<i>", "bos_token": "<s>"}},
    "specials of the map": {"chat_template.jinja": SPECIALS, "special_tokens_map.json": {"bos_token": "<x>",
                                                                                         "pad_token": token("<p>")}},
    "by name": {CONFIG: {"chat_template": [
        {"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]}},
    "by name, without a default": {CONFIG: {"chat_template": [{"name": "tool_use", "template": "no"}]}},
    "file over config": {"chat_template.jinja": CHATML, CONFIG: {"chat_template": "no"}},
    "additional files": {"chat_template.jinja": CHATML, "additional_chat_templates/tool_use.jinja": "no"},
    "additional files alone": {"additional_chat_templates/tool_use.jinja": "no", CONFIG: {"chat_template": CHATML}},
    "an additional default": {"chat_template.jinja": "no", "additional_chat_templates/default.jinja": CHATML},
    "no template": {},
    "no Jinja": {"chat_template.jinja": "{% for %}"},
}  # fmt: skip
ENDS: dict[str, tuple[Files, Files | None]] = {  # config.json, generation_config.json
    "none": ({}, None),
    "null": ({"eos_token_id": None}, None),
    "an id": ({"eos_token_id": 7}, None),
    "a list": ({"eos_token_id": [7, 8]}, None),
    "the inner one": ({"text_config": {"eos_token_id": 9}}, None),
    "both": ({"eos_token_id": 7, "text_config": {"eos_token_id": 9}}, None),
    "generation's": ({"eos_token_id": 7}, {"eos_token_id": [9, 10]}),
    "generation's alone": ({}, {"eos_token_id": 9}),
    "generation's is absent": ({"eos_token_id": 7}, {"temperature": 0.5}),
    "the tokenizer's is another": ({"eos_token_id": 7}, {"eos_token_id": 9, "bos_token_id": 1}),
    "sampled": ({}, {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}),
    "sampled without numbers": ({}, {"do_sample": True}),
    "sampled with null": ({}, {"do_sample": True, "temperature": None, "top_p": None, "top_k": None}),
    "top_k off": ({}, {"do_sample": True, "top_k": 0, "min_p": 0.05}),
    "not sampled": ({}, {"do_sample": False, "temperature": 0.7, "typical_p": 0.5}),
    "sampled by config.json": ({"do_sample": True, "temperature": 0.5}, None),
    "integers": ({}, {"do_sample": True, "temperature": 1, "top_p": 1, "repetition_penalty": 1}),
    **{f"{name} {value}": ({}, {"do_sample": True, name: value}) for name, value in (
        ("repetition_penalty", 1.05), ("no_repeat_ngram_size", 3), ("typical_p", 0.9), ("suppress_tokens", [3]),
        ("min_new_tokens", 4), ("num_beams", 2), ("eta_cutoff", 0.001), ("bad_words_ids", [[3]]))},
}  # fmt: skip


def variants() -> Iterator[Variant]:
    """Every one for every family, and every change of a tokenizer beside every change of what stands by it."""
    for family in FAMILIES:
        for name, content in FILES.items():
            yield _variant(family, "tokenizer.json", name, {TOKENIZER: DEMO | content})
        for name, files in BESIDE.items():
            yield _variant(family, "beside tokenizer.json", name, files)
        for name, files in PIECES.items():
            for kind in ("bpe", "unigram"):
                yield _variant(family, "tokenizer.model", f"{kind}, {name}", {TOKENIZER: None, **files}, kind)
        for name, files in TEMPLATES.items():
            yield _variant(family, "templates", name, files)
        for name, (config, generation) in ENDS.items():
            nested = {"model_type": "qwen3_5_moe_text", **config.get("text_config", {})}
            if "text_config" in config and family != "qwen3_5_moe":
                continue
            config = {"model_type": family, **config, **({"text_config": nested} if "text_config" in config else {})}
            yield _variant(family, "generation", name, {"config.json": config, GENERATION: generation})
    for at, (name, content) in enumerate(FILES.items()):
        for by, (beside, files) in enumerate(BESIDE.items()):
            family = FAMILIES[(at * len(BESIDE) + by) % len(FAMILIES)]
            yield _variant(family, "both", f"{name}; {beside}", {TOKENIZER: DEMO | content, **files})


def write_base(family: str, directory: Path) -> Path:
    """What every variant begins with: the demo model's tokenizer."""
    directory.mkdir(parents=True)
    _write(directory, {"config.json": {"model_type": family}, TOKENIZER: DEMO})
    return directory


def _variant(family: str, axis: str, name: str, files: Files, pieces: str | None = None) -> Variant:
    def write(directory: Path) -> None:
        _write(directory, files)
        if pieces is not None:
            (directory / "tokenizer.model").write_bytes(trained(pieces))

    return Variant(family=family, axis=axis, name=name, write=write)


def _write(directory: Path, files: Files) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


@lru_cache
def trained(kind: str) -> bytes:
    """A small sentencepiece model with a user's token, and bytes for what it does not know."""
    from io import BytesIO

    import sentencepiece

    model, sentences = BytesIO(), ["Once upon a time there was a fox.", "The quick brown fox jumps over the lazy dog."]
    more: dict[str, Callable[[], Any] | Any] = (
        dict(vocab_size=320, normalization_rule_name="identity") if kind == "bpe" else dict(vocab_size=300)
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences * 20), model_writer=model, model_type=kind, byte_fallback=True,
        hard_vocab_limit=False, user_defined_symbols=["<tool>"], minloglevel=2, **more,
    )  # fmt: skip
    return model.getvalue()
