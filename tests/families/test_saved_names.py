"""Whatever names transformers saves a model under, and whatever model it is a part of, the weights are the same."""

import jax
import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, random_model
from safetensors.torch import load_file, save_file

from seqmoe_jax.errors import CheckpointError
from seqmoe_jax.loading import load_model


def weights(directory):
    model = load_model(directory)[0]
    return jax.tree.leaves((model.weights, model.pools))


def same(directory, expected):
    found = weights(directory)
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


def rename(directory, old, new):
    """Turns the beginning of every name that begins with `old`, and adds what other parts of a model have."""
    tensors = load_file(directory / "model.safetensors")
    tensors = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_names_that_transformers_saves_are_read(family, tmp_path):
    model = random_model(family)
    model.save_pretrained(tmp_path / "published")
    expected = weights(tmp_path / "published")
    model.save_pretrained(tmp_path / "own", save_original_format=False)
    assert same(tmp_path / "own", expected)
    # The decoder alone has no root; its head may have been put beside it.
    for original in (False, True):
        bare = tmp_path / f"bare-{original}"
        model.base_model.save_pretrained(bare, save_original_format=original)
        if not model.config.tie_word_embeddings:
            head = "head.weight" if family == "deepseek_v4" and original else "lm_head.weight"
            with pytest.raises(CheckpointError, match=f"1 missing .{head}"):
                load_model(bare)
            tensors = load_file(bare / "model.safetensors") | {head: model.lm_head.weight.detach()}
            save_file(tensors, bare / "model.safetensors", {"format": "pt"})
        assert same(bare, expected)


@pytest.mark.parametrize("root", ["model.language_model.", "language_model.model.", "thinker.model."])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe"])
def test_a_decoder_inside_of_a_model_that_also_sees(family, root, tmp_path, caplog):
    model = random_model(family)
    model.save_pretrained(tmp_path)
    expected = weights(tmp_path)
    rename(tmp_path, "model.", root)
    assert same(tmp_path, expected)
    if root.endswith(".model."):
        rename(tmp_path, "lm_head.", root.removesuffix("model.") + "lm_head.")
    others = ["vision_tower.patch.weight", "model.visual.blocks.0.attn.qkv.weight", "multi_modal_projector.linear.bias"]
    tensors = load_file(tmp_path / "model.safetensors") | {name: torch.ones(2) for name in others}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with caplog.at_level("INFO", "seqmoe_jax"):
        assert same(tmp_path, expected)
    assert "left out *visual.* (1 tensors), *vision_* (1 tensors), *multi_modal_projector.* (1 tensors)" in caplog.text


def test_unknown_tensors_are_refused_by_name(tmp_path):
    model = random_model("mixtral")
    model.save_pretrained(tmp_path)
    rename(tmp_path, "model.layers.1.input_layernorm.weight", "model.layers.1.input_norm.weight")
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path)
    assert "1 missing (model.layers.1.input_layernorm.weight)" in str(caught.value)
    assert "1 unexpected (model.layers.1.input_norm.weight)" in str(caught.value)
