"""What was once read otherwise than transformers reads it. Each case stands for a kind."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from directories import EQUAL, Variant, changing, read_config, write_config
from readings import compare, ours, theirs
from safetensors.torch import load_file, save_file

from seqmoe_jax.loading import load_model
from seqmoe_jax.models.families import FAMILIES, gpt_oss

GENERATOR = torch.Generator().manual_seed(7)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def rewriting(change):
    def write(directory):
        path = directory / "model.safetensors"
        save_file(change(load_file(path)), path, {"format": "pt"})

    return write


def both(*writes):
    def write(directory):
        for one in writes:
            one(directory)

    return write


def head(tensors):
    embed = tensors["model.embed_tokens.weight"]
    return torch.randn(embed.shape, generator=GENERATOR).to(embed.dtype) * embed.shape[1] ** -0.5 * 1.5


def is_equal(bases, family, write):
    verdict = compare(Variant(family=family, axis="kind", name="kind", write=write), bases(family))
    assert verdict.kind == EQUAL, verdict.reason


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["mixtral"])
def test_a_head_in_the_files_is_the_models_head(bases, family, tied):
    write = both(
        rewriting(lambda tensors: tensors | {"lm_head.weight": head(tensors)}),
        changing(lambda config: config | {"tie_word_embeddings": tied}),
    )
    is_equal(bases, family, write)


def test_a_head_that_is_the_embedding_is_held_once(bases, tmp_path):
    def copied(tensors):
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    base = bases("granitemoe")
    directory = Variant(family="", axis="", name="", write=rewriting(copied)).make(base, tmp_path / "model")
    assert load_model(directory)[0].spec.tied


def test_either_of_embedding_and_head_is_enough_where_they_are_tied(bases):
    def renamed(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        return tensors

    is_equal(bases, "granitemoe", rewriting(renamed))


@pytest.mark.parametrize(("outer", "inner"), [(False, True), (True, None)])
@pytest.mark.parametrize("own", [True, False], ids=["own head", "no head"])
def test_either_flag_of_a_nested_config_ties_a_head_that_is_not_there(bases, tmp_path, outer, inner, own):
    """A head in the files is used whatever the flags say; without one it is the embedding, if one of them says so."""

    def nest(directory):
        flags = ({} if flag is None else {"tie_word_embeddings": flag} for flag in (outer, inner))
        config, inside = read_config(directory), {}
        config.pop("tie_word_embeddings", None)
        (outside, inside) = flags
        write_config(directory, {"model_type": "qwen3_5_moe", "text_config": config | inside} | outside)
        if not own:
            rewriting(lambda tensors: {k: v for k, v in tensors.items() if k != "lm_head.weight"})(directory)

    base = bases("qwen3_5_moe_text")
    directory = Variant(family="", axis="", name="", write=nest).make(base, tmp_path / "model")

    def tie(directory):  # what it must mean, in words that leave no doubt
        config = read_config(directory)
        config["tie_word_embeddings"] = not own
        write_config(directory, config)
        if not own:
            rewriting(lambda tensors: {k: v for k, v in tensors.items() if k != "lm_head.weight"})(directory)

    plain = Variant(family="", axis="", name="", write=tie).make(base, tmp_path / "plain")
    tokens, expected = theirs(plain)
    torch.testing.assert_close(torch.from_numpy(ours(directory, tokens).copy()), torch.from_numpy(expected), atol=1e-3,
                               rtol=0)  # fmt: skip


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe_lite", "gpt_oss"])
def test_rope_scaling_stands_above_rope_parameters(bases, family):
    plain = {"rope_type": "default", "rope_theta": 10000}

    def spell(config):
        if config.get("head_dim", 16) is None:  # as transformers writes it, and cannot read it beside YaRN
            config["head_dim"] = 16
        return config | {"rope_parameters": plain, "rope_scaling": YARN}

    is_equal(bases, family, changing(spell))


@pytest.mark.parametrize("said", [{}, {"torch_dtype": "bfloat16"}])
def test_float32_weights_stay_float32_whatever_the_config_says(bases, said):
    def widen(tensors):
        return {name: value.float() * (1 + 1e-3 * torch.rand(value.shape, generator=GENERATOR))
                for name, value in tensors.items()}  # fmt: skip

    def name_no_dtype(config):
        return {name: value for name, value in config.items() if name != "dtype"} | said

    is_equal(bases, "mixtral", both(rewriting(widen), changing(name_no_dtype)))


# Of what is no field of a configuration class: what the class does where the file has none.
BESIDE = {"full_attention_interval": 4, "num_hash_layers": 3, "attention_bias": False, "rope_interleave": True}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_file_leaves_out_is_what_transformers_takes(model_type):
    text = "qwen3_5_moe_text" if model_type == "qwen3_5_moe" else model_type
    cls = transformers.models.auto.configuration_auto.CONFIG_MAPPING[text]
    rope = cls().rope_parameters
    for name, value in FAMILIES[model_type].defaults.items():
        if name == "rope_theta":
            assert cls.default_theta == value
        elif name == "partial_rotary_factor":
            assert rope[name] == value
        elif name in cls.__dataclass_fields__:
            # Nothing stands for a table as well as an empty one does.
            assert cls.__dataclass_fields__[name].default == (value or None if isinstance(value, dict) else value), name
        else:
            assert value is None or BESIDE[name] == value, name


def test_gpt_oss_without_rotary_positions_has_those_that_transformers_takes():
    theirs = transformers.GptOssConfig().rope_parameters
    assert {key: theirs[key] for key in gpt_oss.YARN} == gpt_oss.YARN
