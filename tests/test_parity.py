"""The same tokens and logits as `transformers` in float32, with most experts outside the slots."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from seqmoe_jax.decode.policy import ReactivePolicy
from seqmoe_jax.decode.state import Offload, empty_sequences
from seqmoe_jax.decode.step import StepConfig, forward
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.loading import load_model
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.testing import tiny_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
st = pytest.importorskip("safetensors.torch")

NEW = 64
PROMPT = [(37 * i + 11) % 256 for i in range(21)]
# Wide enough for several 128 x 128 blocks and a ragged one.
FP8_SIZES = {"hidden_size": 192, "moe_intermediate_size": 160, "head_dim": 32}


def save(directory: Path, *, fp8: bool) -> Path:
    """A tiny random model as transformers writes it; for FP8, its projections in 128 x 128 blocks."""
    torch.manual_seed(3)
    config = tiny_config(**(FP8_SIZES if fp8 else {}))
    config.pop("torch_dtype"), config.pop("rope_theta")
    rope = {"rope_type": "default", "rope_theta": 1e6}
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**config, rope_parameters=rope, eos_token_id=None)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from the flat initial state, so that routers and heads decide clearly.
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5 * 1.5)
    model.to(torch.bfloat16).save_pretrained(directory)
    if fp8:
        quantise(directory)
    return directory


def quantise(directory: Path) -> None:
    """Projections to FP8-block in place; what they mean, in float32, to `dequantised.safetensors`."""
    tensors = st.load_file(directory / "model.safetensors")
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            stored[name] = tensor
            meant[name] = tensor.float()
            continue
        rows, cols = tensor.shape
        scale = torch.zeros(-(-rows // 128), -(-cols // 128))
        values = torch.zeros(rows, cols, dtype=torch.float8_e4m3fn)
        product = torch.zeros(rows, cols)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
                scale[i, j] = (tensor[block].float().abs().max() / 448).bfloat16().float()
                values[block] = (tensor[block].float() / scale[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
                product[block] = values[block].float() * scale[i, j]
        stored[name], stored[name + "_scale_inv"], meant[name] = values, scale.bfloat16(), product
    st.save_file(stored, directory / "model.safetensors", {"format": "pt"})
    (directory / "reference").mkdir()
    config = json.loads((directory / "config.json").read_text())
    (directory / "reference" / "config.json").write_text(json.dumps(config))
    st.save_file(meant, directory / "reference" / "model.safetensors", {"format": "pt"})
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def case(request, tmp_path_factory):
    """(our model, reference tokens, reference logits of every position)."""
    directory = save(tmp_path_factory.mktemp(request.param), fp8=request.param == "fp8")
    reference = directory / "reference" if request.param == "fp8" else directory
    oracle = transformers.Qwen3MoeForCausalLM.from_pretrained(
        reference, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        tokens = oracle.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        logits = oracle(tokens).logits[0].numpy()
    model, _ = load_model(directory)
    stored = model.spec.expert_layout.field("gate").dtype
    assert stored == np.dtype(ml_dtypes.float8_e4m3fn if request.param == "fp8" else ml_dtypes.bfloat16)
    return model, tokens[0].tolist(), logits


@pytest.mark.parametrize(("policy", "residency"), [("full", 1.0), ("seqmoe", 0.3), ("lru", 0.3)])
def test_greedy_tokens_are_equal(case, policy, residency):
    model, tokens, _ = case
    engine = TokenEngine(model, EngineOptions(policy=policy, residency=residency))
    new = [event.token for event in engine.run([PROMPT], max_new_tokens=NEW)]
    assert new == tokens[len(PROMPT) :]
    assert (engine.last_stats.hit_rate < 1) == (residency < 1)


def test_logits_are_equal_to_a_ten_thousandth(case):
    model, tokens, expected = case
    engine = TokenEngine(model, EngineOptions(policy="lru", residency=0.3))
    config = StepConfig(
        spec=model.spec, cache=engine.config, policy=ReactivePolicy(), greedy=True, vocab=model.spec.vocab
    )
    step = jax.jit(lambda s, o: forward(s, o, model.weights, model.pools, config=config))
    sequences = empty_sequences(spec=model.spec, batch=1, capacity=256, dtype=engine.dtype)
    offload = engine.offloading.state
    for position, token in enumerate(tokens):
        sequences = sequences._replace(
            token=jnp.asarray([token], jnp.int32), position=jnp.asarray([position], jnp.int32)
        )
        logits, sequences, offload, _ = step(sequences, Offload(*offload))
        np.testing.assert_allclose(np.asarray(logits[0]), expected[position], atol=1e-4)
