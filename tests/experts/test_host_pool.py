"""The host pool holds each expert as its layout says, however it was stored, and XLA sees it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxtyping import Array
from safetensors.numpy import save_file

from pallas_kernels.fused_moe.swiglu import unpack_weight
from pallas_kernels.layout import FP4, FP8, ExpertLayout, swiglu_layout
from scripts.checks.random_checkpoint import make_config, write_checkpoint
from seqmoe_jax.checkpoints.check import check_names
from seqmoe_jax.checkpoints.names import names_of
from seqmoe_jax.checkpoints.read import read_part, read_scales, read_source
from seqmoe_jax.checkpoints.safetensors import Checkpoint, open_checkpoint
from seqmoe_jax.checkpoints.scales import scales_of
from seqmoe_jax.checkpoints.sources import NameMap
from seqmoe_jax.errors import CheckpointError, ConfigError
from seqmoe_jax.experts import host_pool
from seqmoe_jax.experts.host_pool import load_host_pool
from seqmoe_jax.experts.random_pool import random_host_pool
from seqmoe_jax.models.families import spec_from_config

LAYERS, EXPERTS, HIDDEN, WIDTH = 3, 4, 256, 192
BF16 = np.dtype(ml_dtypes.bfloat16)


@jax.jit
def read_row(pool: Array, index: Array) -> Array:
    row = jax.lax.dynamic_index_in_dim(pool, index, keepdims=False)
    return jax.device_put(row, jax.memory.Space.Device)


def written(directory: Path, dtype: str, **sizes: int) -> tuple[Checkpoint, NameMap]:
    config = make_config(
        layers=LAYERS, experts=EXPERTS, top_k=2, hidden=HIDDEN, width=WIDTH, vocab=32, dtype=dtype, **sizes
    )
    write_checkpoint(directory, config, shard_size=10**6)
    checkpoint = open_checkpoint(directory)
    names = names_of(spec_from_config(config), checkpoint.names)
    check_names(checkpoint, names)
    return checkpoint, names


def load(checkpoint: Checkpoint, names: NameMap, layout: ExpertLayout, **more: Any) -> tuple[Array, ...]:
    return load_host_pool(
        checkpoint, names, layout, num_layers=LAYERS, num_experts=EXPERTS, device=jax.devices()[0], **more
    )


def packed(checkpoint: Checkpoint, names: NameMap, layout: ExpertLayout, layer: int, expert: int) -> np.ndarray:
    tensors = {}
    for name, source in names.experts[layer][expert].items():
        dtype = layout.field(name).dtype
        if dtype == FP8:
            tensors[name] = read_part(checkpoint, source)
            scales = scales_of(checkpoint, names, source)
            tensors[name + "_scale"] = read_scales(checkpoint, scales, source.part_shape).astype(np.float32)
        else:
            tensors[name] = read_source(checkpoint, names, source, dtype)
    return layout.pack(tensors)


@pytest.mark.parametrize(
    ("stored", "block", "dtype"),
    [
        ("bf16", 128, BF16),  # bytes as they are
        ("fp8", 128, FP8),  # bytes as they are, scales converted
        ("bf16", 128, np.dtype(np.float32)),  # converted
        ("fp8", 128, BF16),  # dequantised
        ("fp8", 48, BF16),  # dequantised, blocks that no kernel takes
    ],
)
def test_every_expert_is_packed_as_its_layout_says(tmp_path: Path, stored: str, block: int, dtype: np.dtype):
    checkpoint, names = written(tmp_path, stored, block=block)
    layout = swiglu_layout(hidden=HIDDEN, width=WIDTH, dtype=dtype)
    steps: list[tuple[int, int]] = []
    pool = load(checkpoint, names, layout, progress=lambda done, total: steps.append((done, total)))
    assert len(pool) == LAYERS
    for layer, array in enumerate(pool):
        assert array.shape == (EXPERTS, layout.block_elems)
        assert array.dtype == layout.storage
        assert array.sharding.memory_kind == "pinned_host"
        for expert in range(EXPERTS):
            row = np.asarray(read_row(array, jnp.int32(expert)))
            expected = packed(checkpoint, names, layout, layer, expert)
            np.testing.assert_array_equal(row.view(np.uint8), expected.view(np.uint8))
    assert steps[-1][0] == steps[-1][1]
    assert steps == sorted(steps)


def gpt_oss(directory: Path, **changes: Any) -> tuple[Checkpoint, NameMap, ExpertLayout, dict[str, np.ndarray]]:
    """A checkpoint of random numbers and bytes under GPT-OSS's names."""
    config = {
        "model_type": "gpt_oss", "vocab_size": 16, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 3,
        "num_experts_per_tok": 2, "max_position_embeddings": 64, "torch_dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    } | changes  # fmt: skip
    spec, rng = spec_from_config(config), np.random.default_rng(0)
    arrays = {
        source.tensor: rng.integers(0, 256, source.shape, np.uint8)
        if source.packed
        else rng.standard_normal(source.shape, np.float32)
        for source in names_of(spec, frozenset()).sources()
    }
    save_file(arrays, directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    names = names_of(spec, checkpoint.names)
    check_names(checkpoint, names)
    return checkpoint, names, spec.expert_layout, arrays


@pytest.mark.parametrize("quantised", [False, True])
def test_interleaved_and_transposed_experts_are_taken_apart(tmp_path: Path, quantised: bool):
    changes = {"quantization_config": {"quant_method": "mxfp4"}} if quantised else {}
    checkpoint, names, layout, arrays = gpt_oss(tmp_path, **changes)
    (pool,) = load_host_pool(checkpoint, names, layout, num_layers=1, num_experts=3, device=jax.devices()[0])

    def theirs(name: str) -> np.ndarray:
        return arrays[f"model.layers.0.mlp.experts.{name}"]

    for expert, block in enumerate(np.asarray(pool)):
        expected = {f"{name}_bias": theirs("gate_up_proj_bias")[expert, i::2] for i, name in enumerate(("gate", "up"))}
        expected["down_bias"] = theirs("down_proj_bias")[expert]
        if quantised:
            for parity, name in enumerate(("gate", "up")):
                expected[name] = theirs("gate_up_proj_blocks")[expert, parity::2].reshape(32, 32)
                expected[f"{name}_scale"] = theirs("gate_up_proj_scales")[expert, parity::2]
            expected["down"] = theirs("down_proj_blocks")[expert].reshape(64, 16)
            expected["down_scale"] = theirs("down_proj_scales")[expert]
        else:
            expected |= {name: theirs("gate_up_proj")[expert, :, i::2].T for i, name in enumerate(("gate", "up"))}
            expected["down"] = theirs("down_proj")[expert].T
        np.testing.assert_array_equal(block, layout.pack(expected))


def test_fp8_scales_may_be_powers_of_two(tmp_path: Path):
    """DeepSeek-V4 stores them as exponents."""
    checkpoint, names = written(tmp_path, "fp8")
    info, source = checkpoint.info, names.experts[0][0]["gate"]

    class Exponents(Checkpoint):
        """The same checkpoint, every scale 2 ** -7."""

        def __init__(self) -> None:
            self.__dict__.update(checkpoint.__dict__)

        def info(self, name: str):
            found = info(name)
            return replace(found, dtype=np.dtype(ml_dtypes.float8_e8m0fnu)) if name.endswith("_inv") else found

        def read_into(self, name: str, out: np.ndarray, byte_offset: int = 0) -> None:
            if name.endswith("_inv"):
                out[...] = 120
            else:
                checkpoint.read_into(name, out, byte_offset)

    check_names(Exponents(), names)
    layout = swiglu_layout(hidden=HIDDEN, width=WIDTH, dtype=FP8)
    block = np.asarray(load(Exponents(), names, layout)[0][0])
    np.testing.assert_array_equal(layout.unpack(jnp.asarray(block), "gate_scale"), 2.0**-7)
    plain = read_part(checkpoint, source).astype(np.float32) * 2.0**-7
    np.testing.assert_array_equal(unpack_weight(jnp.asarray(block), layout, "gate"), plain)


def test_random_fp4_experts_have_the_spread_of_the_others():
    layout = swiglu_layout(hidden=256, width=384, dtype=FP4, bias=BF16)
    (pool,) = random_host_pool(layout, 1, 2)
    for name, fan_in in (("gate", 256), ("down", 384)):
        weight = np.asarray(unpack_weight(jnp.asarray(np.asarray(pool)[1]), layout, name))
        assert 0.5 < weight.std() * fan_in**0.5 < 2


def test_layouts_that_the_files_cannot_fill(tmp_path: Path):
    layout = swiglu_layout(hidden=HIDDEN, width=WIDTH, dtype=FP8)
    with pytest.raises(ConfigError, match="not quantised while loading"):
        load(*written(tmp_path / "a", "bf16"), layout)
    with pytest.raises(ConfigError, match=r"got one for \[16, 16\] of"):
        load(*written(tmp_path / "b", "fp8", block=16), layout)
    checkpoint, names = written(tmp_path / "c", "fp8")
    with pytest.raises(CheckpointError, match=r"to give gate \[128, 256\], got \[192, 256\]"):
        load(checkpoint, names, swiglu_layout(hidden=HIDDEN, width=128, dtype=FP8))
    with pytest.raises(ConfigError, match="expected 2 MoE layers of 4 experts"):
        load_host_pool(checkpoint, names, layout, num_layers=2, num_experts=4, device=jax.devices()[0])


def test_a_file_cut_while_loading(tmp_path: Path):
    checkpoint, names = written(tmp_path, "bf16")
    for path in tmp_path.glob("*.safetensors"):
        os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="download it again"):
        load(checkpoint, names, swiglu_layout(hidden=HIDDEN, width=WIDTH, dtype=BF16))


@pytest.mark.parametrize("dtype", [FP8, BF16, np.dtype(np.float32)], ids=str)
def test_random_pool(dtype: np.dtype, monkeypatch: pytest.MonkeyPatch):
    layout = swiglu_layout(hidden=256, width=384, dtype=dtype)
    pool = random_host_pool(layout, 2, 3, seed=1, scale=2.0)
    experts = {}
    for layer, array in enumerate(pool):
        rows = jnp.stack([read_row(array, jnp.int32(expert)) for expert in range(3)])
        for name, fan_in in (("gate", 256), ("up", 256), ("down", 384)):
            values = np.asarray(layout.unpack(rows, name)).astype(np.float32)
            if dtype == FP8:
                scales = np.asarray(layout.unpack(rows, name + "_scale"))
                assert (scales > 0).all()
                values = values * scales.repeat(128, 1).repeat(128, 2)[:, : values.shape[1], : values.shape[2]]
            assert np.isfinite(values).all()
            assert values.std() == pytest.approx(2 / fan_in**0.5, rel=0.1)
            assert abs(values.mean()) < 0.02 * values.std()
        experts.update({(layer, expert): np.asarray(rows[expert]).tobytes() for expert in range(3)})
    assert len(set(experts.values())) == 6
    monkeypatch.setattr(host_pool, "workers", lambda: 1)
    again = random_host_pool(layout, 2, 3, seed=1, scale=2.0)
    assert np.asarray(read_row(again[1], jnp.int32(2))).tobytes() == experts[1, 2]
    other = random_host_pool(layout, 2, 3, seed=2, scale=2.0)
    assert np.asarray(read_row(other[1], jnp.int32(2))).tobytes() != experts[1, 2]
