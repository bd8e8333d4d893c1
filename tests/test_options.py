"""Options are said once: keyword arguments, the commands' arguments and the docs follow the two classes of options."""

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import pallas_kernels.backend
from seqmoe_jax.api import Keywords, LoadKeywords
from seqmoe_jax.cli.arguments import engine_options
from seqmoe_jax.cli.main import build_parser
from seqmoe_jax.errors import ConfigError, PromptError
from seqmoe_jax.experts.policy import POLICIES
from seqmoe_jax.options import (
    EngineKeywords,
    EngineOptions,
    GenerateKeywords,
    GenerateOptions,
    Kernels,
    Policy,
    SamplingConfig,
    Transfers,
    meanings,
)
from seqmoe_jax.prefetch.engine import ENGINES

PAIRS = [(EngineOptions, EngineKeywords), (GenerateOptions, GenerateKeywords)]
DOCS = Path(__file__).parents[1] / "docs" / "options.md"


def arguments_of(*words):
    return build_parser(words[0]).parse_args(words)


@pytest.mark.parametrize(("options", "keywords"), PAIRS)
def test_keywords_are_the_fields_names_and_types(options, keywords):
    assert get_type_hints(keywords) == get_type_hints(options)
    assert list(keywords.__annotations__) == [field.name for field in fields(options)]
    assert all(field.default is not MISSING for field in fields(options))
    assert list(meanings(options)) == list(keywords.__annotations__)


def test_the_function_generate_takes_what_load_and_the_method_take():
    assert get_type_hints(Keywords) == {**get_type_hints(LoadKeywords), **get_type_hints(GenerateKeywords)}


def test_names_that_options_admit_are_those_there_are():
    assert get_args(Policy) == tuple(POLICIES)
    assert get_args(Transfers) == tuple(ENGINES)
    assert get_args(Kernels) == get_args(pallas_kernels.backend.Implementation)


def test_a_command_without_arguments_chooses_the_defaults():
    without = {"generate": {"max_batch"}, "trace": {"max_batch"}, "serve": set()}
    more = {"generate": ["--prompt", "a"], "trace": ["--prompts", "p", "--out", "t"], "serve": []}
    for command, absent in without.items():
        chosen = engine_options(arguments_of(command, *more[command]))
        defaults = {field.name: field.default for field in fields(EngineOptions)}
        assert chosen == {name: value for name, value in defaults.items() if name not in absent}


def test_every_option_can_be_written_as_an_argument():
    chosen = EngineOptions(
        residency=0.5, policy="lru", predictor="dir", transfers="none", max_batch=3, context=7, dtype="float32",
        kernels="xla", decode_kernels=False, scheduler="promoe", tasks=5, threshold=0.5, refine=False,
    )  # fmt: skip
    words = []
    for name, value in vars(chosen).items():
        flag = name.replace("_", "-")
        if value is False:
            words.append(f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    assert EngineOptions(**engine_options(arguments_of("serve", *words))) == chosen
    budget = engine_options(arguments_of("serve", "--device-memory", "12GiB", "--residency", "least"))
    assert (budget["device_memory"], budget["residency"]) == ("12GiB", "least")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(policy="magic"), "unknown policy 'magic': expected one of seqmoe, lru"),
        (dict(transfers="pigeon"), "unknown transfer engine"),
        (dict(residency=0.5, device_memory="1GB"), "not both"),
    ],
)
def test_faults_of_an_engine_show_before_a_model_is_loaded(wrong, words):
    with pytest.raises(ConfigError, match=words):
        EngineOptions(**wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(max_new_tokens=0), "max_new_tokens must be an integer from 1"),
        (dict(stop="abc"), "list of non-empty strings"),
        (dict(stop=[""]), "list of non-empty strings"),
        (dict(sampling="best"), "'greedy', 'model' or a SamplingConfig"),
        (dict(temperature=-1), "temperature must be"),
    ],
)
def test_faults_of_a_generation_show_before_a_model_is_loaded(wrong, words):
    with pytest.raises((ConfigError, PromptError), match=words):
        GenerateOptions(**wrong)


def test_numbers_replace_single_ones_of_what_sampling_names():
    theirs = SamplingConfig(temperature=0.6, top_k=20)
    assert GenerateOptions().sampling_over(theirs) == SamplingConfig()
    assert GenerateOptions(sampling="model", top_p=0.5).sampling_over(theirs) == theirs.override(top_p=0.5)
    greedy = theirs.override(temperature=0)
    assert GenerateOptions(sampling=theirs, temperature=0).sampling_over(SamplingConfig()) == greedy


def test_the_docs_have_every_option_with_its_default_and_meaning():
    text = DOCS.read_text()
    for options, _ in PAIRS:
        said = meanings(options)
        for field in fields(options):
            default = "" if field.default is None else f"`{field.default!r}`"
            assert f"| `{field.name}` | {default} | {said[field.name]} |".replace("|  |", "| |") in text, field.name
    named = re.findall(r"^\| `(\w+)`", text, re.MULTILINE)
    assert named == [field.name for options, _ in PAIRS for field in fields(options)]
