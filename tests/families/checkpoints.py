"""Tiny random checkpoints of every family, as transformers writes them, and what transformers makes of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.utils.logging.disable_progress_bar()

PROMPT = [(37 * i + 11) % 256 for i in range(50)]
NEW = 48
# Enough for two sequences of three experts each at residency 0.3, in models of two MoE layers and of one.
EXPERTS, EXPERTS_OF_ONE = 16, 32

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 3,
}


def default_rope(theta: float = 1e6, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more}


def yarn(**more: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    return {"rope_parameters": rope | more}


# Keys and values of different sizes, so that a transposition shows.
DELTA_NET: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=24, linear_conv_kernel_dim=4,
)  # fmt: skip
LATENT: dict[str, Any] = dict(
    intermediate_size=96, moe_intermediate_size=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=24, n_routed_experts=EXPERTS_OF_ONE,
)  # fmt: skip


# model_type -> (class, what its config says beyond COMMON): small, and every branch of the family in use.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "Mixtral",
        dict(intermediate_size=48, num_key_value_heads=2, num_local_experts=EXPERTS, sliding_window=20,
             **default_rope()),
    ),
    "olmoe": (
        "Olmoe",
        dict(intermediate_size=32, num_key_value_heads=2, num_experts=EXPERTS, norm_topk_prob=False, clip_qkv=0.5),
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        dict(intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=48,
             num_key_value_heads=2, num_experts=EXPERTS_OF_ONE, norm_topk_prob=False, mlp_only_layers=[1],
             qkv_bias=True),
    ),
    "glm4_moe": (
        "Glm4Moe",
        dict(intermediate_size=96, moe_intermediate_size=32, num_key_value_heads=2, head_dim=32,
             n_routed_experts=EXPERTS_OF_ONE, n_shared_experts=2, first_k_dense_replace=1, n_group=4, topk_group=2,
             routed_scaling_factor=2.5, use_qk_norm=True, attention_bias=True, num_mtp_layers=0,
             **default_rope(partial_rotary_factor=0.5)),
    ),
    "granitemoe": (
        "GraniteMoe",
        dict(intermediate_size=32, num_key_value_heads=2, num_local_experts=EXPERTS, embedding_multiplier=12.0,
             logits_scaling=6.0, residual_multiplier=0.22, attention_multiplier=0.0625, tie_word_embeddings=True),
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5Moe",
        dict(moe_intermediate_size=32, shared_expert_intermediate_size=48, num_key_value_heads=2, head_dim=32,
             num_experts=EXPERTS, **DELTA_NET,
             **default_rope(1e7, partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True)),
    ),
    "qwen3_next": (
        "Qwen3Next",
        dict(intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=48,
             num_key_value_heads=2, head_dim=32, num_experts=EXPERTS, norm_topk_prob=True, **DELTA_NET,
             **default_rope(1e7, partial_rotary_factor=0.25)),
    ),
    "deepseek_v2": (
        "DeepseekV2",
        dict(**LATENT, q_lora_rank=None, n_shared_experts=2, first_k_dense_replace=1, n_group=4, topk_group=2,
             topk_method="group_limited_greedy", routed_scaling_factor=2.0, **yarn(mscale=0.707, mscale_all_dim=0.707)),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        dict(**LATENT, q_lora_rank=24, num_key_value_heads=4, n_shared_experts=1, first_k_dense_replace=1, n_group=4,
             topk_group=2, routed_scaling_factor=2.5, **yarn(mscale=1.0, mscale_all_dim=0.8)),
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        dict(**LATENT, q_lora_rank=24, num_key_value_heads=4, n_shared_experts=1, n_group=1, topk_group=1,
             rms_norm_eps=1e-5, **default_rope(partial_rotary_factor=1.0)),
    ),
    # One layer of each kind of attention; windows, ratios and the indexer's choice are smaller than the prompt.
    "deepseek_v4": (
        "DeepseekV4",
        dict(num_hidden_layers=3, compress_ratios=[0, 4, 128], compress_rate_hca=8, num_hash_layers=1,
             num_key_value_heads=1, head_dim=32, qk_rope_head_dim=8, q_lora_rank=32, o_groups=2, o_lora_rank=16,
             moe_intermediate_size=32, n_routed_experts=8, n_shared_experts=1, swiglu_limit=1.0, sliding_window=8,
             index_n_heads=8, index_head_dim=16, index_topk=3, compress_rope_theta=160000.0,
             rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 64}),
    ),
    # Its own test is test_parity.py; here with YaRN.
    "qwen3_moe": (
        "Qwen3Moe",
        dict(intermediate_size=96, moe_intermediate_size=32, num_key_value_heads=2, head_dim=32, num_experts=EXPERTS,
             norm_topk_prob=True,
             **yarn()),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A checkpoint and what transformers, in float32, makes of `PROMPT`."""

    directory: Path
    tokens: list[int]  # the prompt and NEW greedy ones
    logits: np.ndarray  # [len(tokens), V]


FAMILIES["gpt_oss"] = (
    "GptOss",
    dict(intermediate_size=96, num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS, sliding_window=20,
         rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                          "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 16}),
)  # fmt: skip


def random_model(family: str, **more: Any) -> torch.nn.Module:
    """A model of bfloat16 weights."""
    name, changes = FAMILIES[family]
    kind = f"{name}TextConfig" if family.endswith("_text") else f"{name}Config"
    config = getattr(transformers, kind)(**COMMON | changes | more, eos_token_id=None, pad_token_id=None)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    randomize(model)
    return model.to(torch.bfloat16)


def make(family: str, directory: Path) -> Reference:
    """Writes a checkpoint and runs it."""
    random_model(family).save_pretrained(directory)
    return run(FAMILIES[family][0], directory)


def run(name: str, directory: Path) -> Reference:
    oracle = getattr(transformers, f"{name}ForCausalLM").from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        tokens = oracle.eval().generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        logits = oracle(tokens).logits[0].numpy()
    return Reference(directory=directory, tokens=tokens[0].tolist(), logits=logits)


def randomize(model: torch.nn.Module) -> None:
    """Weights far from the initial state, in which biases are zero, norms one, routers flat."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):
                rows = [torch.randperm(model.config.n_routed_experts, generator=generator) for _ in tensor]
                tensor.copy_(torch.stack(rows)[:, : tensor.shape[1]])
            if "inv_freq" in name or not tensor.dtype.is_floating_point:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                value = tensor.mean() + 0.2 * noise  # centred on one or on zero, as it was
            elif name.endswith("A_log"):
                value = noise.clamp(-1, 1)
            elif name.endswith("dt_bias"):
                value = 0.5 * noise
            elif name.endswith("correction_bias"):
                value = 0.2 * noise
            elif name.endswith(("bias", "sinks")):
                value = 0.5 * noise
            elif name.endswith("embed_tokens.weight"):
                value = noise
            else:
                # GPT-OSS holds its experts as [E, in, out].
                turned = type(model).__name__.startswith("GptOss") and ".experts." in name
                value = 1.5 * tensor.shape[-2 if turned else -1] ** -0.5 * noise
            tensor.copy_(value)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., rows, columns] -> codes [..., rows, blocks, 16], exponents [..., rows, blocks], what they mean."""
    blocks = weight.float().unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 6))
    codes = (blocks / 2**exponent).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return packed, (exponent[..., 0] + 127).to(torch.uint8), (E2M1[codes] * 2**exponent).flatten(-2)


def make_mxfp4(directory: Path) -> Reference:
    """GPT-OSS as published: experts in MXFP4. The reference runs on what they mean, which is exact in bfloat16."""
    plain = directory / "dequantised"
    make("gpt_oss", plain)
    tensors = load_file(plain / "model.safetensors")
    stored, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            del stored[name]
            stored[f"{name}_blocks"], stored[f"{name}_scales"], value = to_mxfp4(tensor.mT)
            meant[name] = value.mT.bfloat16().contiguous()
    config = json.loads((plain / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    reference = run("GptOss", plain)
    return Reference(directory=directory, tokens=reference.tokens, logits=reference.logits)
