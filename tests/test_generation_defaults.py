"""End tokens and sampling are those that transformers reads from a model's files, or are refused by name."""

import json
from pathlib import Path

import pytest

import seqmoe_jax
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.options import GenerateOptions, SamplingConfig
from seqmoe_jax.text import eos_token_ids, model_sampling

DEMO = Path(seqmoe_jax.__file__).parent / "demo"


def written(directory, config=None, generation=None):
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("family", "config", "generation", "expected"),
    [
        ("qwen3_moe", {"eos_token_id": 7}, None, (7,)),
        ("qwen3_moe", {"eos_token_id": [7, 8]}, None, (7, 8)),
        ("qwen3_moe", {"eos_token_id": 7}, {"eos_token_id": [9]}, (9,)),
        ("qwen3_moe", {"eos_token_id": 7}, {"temperature": 1.0}, ()),
        ("qwen3_moe", {}, None, ()),
        ("mixtral", {}, None, ()),
        ("mixtral", {"eos_token_id": None}, None, ()),
        ("qwen3_5_moe", {"text_config": {"eos_token_id": 9}}, None, (9,)),
        ("qwen3_5_moe", {"eos_token_id": 7, "text_config": {"eos_token_id": 9}}, None, (7,)),
        ("qwen3_5_moe", {"eos_token_id": None, "text_config": {"eos_token_id": [9, 8]}}, None, (9, 8)),
        ("qwen3_5_moe", {"text_config": {"eos_token_id": 9}}, {"eos_token_id": 5}, (5,)),
        ("gpt_oss", {}, {"eos_token_id": [200002, 199999]}, (200002, 199999, 200012)),  # it calls tools too
    ],
)
def test_end_tokens_are_those_of_the_file_that_counts(tmp_path, family, config, generation, expected):
    assert eos_token_ids(written(tmp_path, config, generation), family) == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6}, {}),
        ({"do_sample": None, "temperature": 0.6}, {}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": True, "temperature": None, "top_k": 20, "top_p": 0.95},
         {"temperature": 1.0, "top_k": 20, "top_p": 0.95}),
        ({"do_sample": True, "top_k": -1}, {"temperature": 1.0}),
        ({"do_sample": True, "top_k": 0, "top_p": 1.0, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"do_sample": True, "temperature": 0, "top_k": 0}, {}),
        ({"do_sample": False, "typical_p": 0.5}, {}),
        ({"do_sample": True, "top_k": 0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1,
          "suppress_tokens": [], "typical_p": 1.0, "renormalize_logits": True, "max_length": 9}, {"temperature": 1.0}),
    ],
)  # fmt: skip
def test_sampling_of_the_model_is_what_its_file_says(tmp_path, generation, expected):
    assert model_sampling(written(tmp_path, generation=generation)) == SamplingConfig(**expected)
    assert model_sampling(DEMO) == SamplingConfig(temperature=0.7, top_k=40)


def test_an_older_config_says_it_itself(tmp_path):
    assert model_sampling(written(tmp_path, {"do_sample": True, "temperature": 0.5})) == SamplingConfig(
        temperature=0.5, top_k=50
    )


@pytest.mark.parametrize(
    "fault",
    [
        {"repetition_penalty": 1.05}, {"no_repeat_ngram_size": 3}, {"bad_words_ids": [[5]]}, {"num_beams": 4},
        {"suppress_tokens": [3]}, {"begin_suppress_tokens": [3]}, {"min_new_tokens": 5}, {"forced_eos_token_id": 2},
        {"sequence_bias": [[[3], 1.0]]}, {"guidance_scale": 1.5}, {"penalty_alpha": 0.6}, {"stop_strings": ["x"]},
        {"typical_p": 0.9}, {"epsilon_cutoff": 1e-3}, {"eta_cutoff": 1e-3}, {"top_h": 0.4}, {"top_p": 2},
        {"temperature": "0.7"}, {"temperature": -1}, {"top_k": "all"}, {"watermarking_config": {"bias": 2.0}},
    ],
    ids=str,
)  # fmt: skip
def test_what_would_change_tokens_and_is_not_done_is_refused_by_name(tmp_path, fault):
    with pytest.raises(ConfigError, match=rf"generation_config\.json.*{next(iter(fault))}") as error:
        model_sampling(written(tmp_path, generation={"do_sample": True, **fault}))
    assert "\n" not in str(error.value)


def test_a_fault_in_them_shows_where_they_are_asked_for():
    fault = ConfigError("generation_config.json: repetition_penalty 1.05 is not supported")
    assert GenerateOptions(temperature=0.5).sampling_over(fault) == SamplingConfig(temperature=0.5)
    with pytest.raises(ConfigError, match="repetition_penalty"):
        GenerateOptions(sampling="model").sampling_over(fault)
