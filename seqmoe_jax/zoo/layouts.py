"""Where model zoos keep the arrays of a Mixture-of-Experts language model, and what their configurations call things.

A layout says for each tensor of ours (`ModelSpec.tensors`, and `layers.{index}.experts.*`) its path in the module:
names of attributes, joined by dots. Arrays of a matrix are `[in, out]`, as Flax has kernels, and either side may be
several axes (heads and their dimension); stacked experts are `[E, in, out]`. After a path, `.T` says that it is the
other way round. Of several paths the first that is there counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from seqmoe_jax.errors import ConfigError

Paths = str | tuple[str, ...]
Zoo = Literal["tunix", "easydel", "bonsai"]
EXPERTS = "layers.{index}.experts"  # what comes before `gate`, `up`, `down` or `gate_up`, and before their biases


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`paths`: of our tensors. `config`: what the zoo's configuration calls fields of a `config.json`; other fields
    have their own names there. `defaults`: what it does not say.

    `late_norms`: norms round to the activations' dtype after their weight has multiplied, whatever the family.
    `beside`: what a MoE block returns beside its output (see `OffloadedMoE`).
    """

    name: str
    paths: Mapping[str, Paths]
    config: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    late_norms: bool = False
    beside: Literal["nothing", "logits", "weights"] = "nothing"

    def candidates(self, tensor: str) -> tuple[str, ...]:
        """Where a tensor may be, `layers.3.mixer.q` for example. Empty: this zoo has none of the kind."""
        found = re.fullmatch(r"layers\.(\d+)\.(.+)", tensor)
        key, index = (tensor, "") if found is None else (f"layers.{{index}}.{found[2]}", found[1])
        paths = self.paths.get(key, ())
        return tuple(path.replace("{index}", index) for path in ([paths] if isinstance(paths, str) else paths))


def layout_of(layout: Zoo | str | Mapping[str, Paths]) -> Layout:
    """The layout that a user names or spells out. Raises `ConfigError`."""
    if isinstance(layout, str) and layout in LAYOUTS:
        return LAYOUTS[layout]
    if not isinstance(layout, Mapping):
        known = ", ".join(map(repr, LAYOUTS))
        raise ConfigError(f"layout must be {known} or a mapping of our names to paths in the module, got {layout!r}")
    for name, paths in layout.items():
        each = paths if isinstance(paths, tuple) else (paths,)
        if not isinstance(name, str) or not all(isinstance(path, str) for path in each):
            raise ConfigError(f"layout: expected a path as text (or several) for {name!r}, got {paths!r}")
    return Layout(name="the mapping", paths=layout)


def _layers(prefix: str, paths: Mapping[str, Paths]) -> dict[str, Paths]:
    """The paths of a layer's tensors, which stand below `prefix`."""

    def whole(path: str) -> str:
        return f"{prefix}.{path}"

    return {
        f"layers.{{index}}.{name}": whole(path) if isinstance(path, str) else tuple(map(whole, path))
        for name, path in paths.items()
    }


TUNIX = Layout(
    name="tunix",
    paths={
        "embed": "embedder.input_embedding.T",
        "final_norm": "final_norm.w",
        "lm_head": "lm_head.w",
        **_layers(
            "layers.{index}",
            {
                "input_norm": "input_layernorm.w",
                "post_norm": "post_attention_layernorm.w",
                **{f"mixer.{name}": f"attn.{name}_proj.w" for name in "qkvo"},
                "mixer.q_norm": "attn.q_norm.w",
                "mixer.k_norm": "attn.k_norm.w",
                "router.weight": "mlp.router.kernel",
                **{f"mlp.{name}": f"mlp.{name}_proj.kernel" for name in ("gate", "up", "down")},
                **{f"experts.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
            },
        ),
    },
    config={
        "num_hidden_layers": "num_layers",
        "hidden_size": "embed_dim",
        "moe_intermediate_size": "hidden_dim",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "use_tied_embedding",
    },
    # Tunix has Qwen3-MoE, and does not say for how long a context it was trained.
    defaults={"model_type": "qwen3_moe", "norm_topk_prob": True, "max_position_embeddings": 40960},
    late_norms=True,
)


def _as_in_files(*, weight: tuple[str, ...], router: tuple[str, ...], experts: Mapping[str, Paths]) -> dict[str, Paths]:
    """Modules that are named as in the files of Hugging Face, with arrays of Flax in them: a `kernel` for a `weight`.
    `weight` are the names of these, `router` the modules of a layer's router."""

    def each(*modules: str) -> tuple[str, ...]:
        return tuple(f"{module}.{name}" for module in modules for name in weight)

    layer: dict[str, Paths] = {
        "input_norm": each("input_layernorm"),
        "post_norm": each("post_attention_layernorm"),
        **{f"mixer.{name}": each(f"self_attn.{name}_proj") for name in "qkvo"},
        **{f"mixer.{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkvo"},
        "mixer.q_norm": each("self_attn.q_norm"),
        "mixer.k_norm": each("self_attn.k_norm"),
        "mixer.sinks": "self_attn.sinks",
        "router.weight": each(*router),
        "router.bias": tuple(f"{module}.bias" for module in router),
        **{f"mlp.{name}": each(f"mlp.{name}_proj") for name in ("gate", "up", "down")},
        **{f"shared.{name}": each(f"mlp.shared_expert.{name}_proj") for name in ("gate", "up", "down")},
        "shared.weight": each("mlp.shared_expert_gate"),
        **experts,
    }
    return {
        "embed": "model.embed_tokens.embedding.T",
        "final_norm": each("model.norm"),
        "lm_head": each("lm_head"),
        **_layers("model.layers.{index}", layer),
    }


_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}  # as its files call them
EASYDEL = Layout(
    name="easydel",
    paths=_as_in_files(
        weight=("kernel", "weight"),
        router=("mlp.gate", "block_sparse_moe.gate", "mlp.router"),
        experts={
            **{
                f"experts.{name}": tuple(
                    f"{module}.{kind}"
                    for module in (f"mlp.experts.{name}_proj", f"block_sparse_moe.experts.{_MIXTRAL[name]}")
                    for kind in ("kernel", "weight")
                )
                for name in _MIXTRAL
            },
            **{f"experts.{name}_bias": f"mlp.experts.{name}_proj.bias" for name in _MIXTRAL},
        },
    ),
    beside="logits",
)
BONSAI = Layout(
    name="bonsai",
    paths=_as_in_files(
        weight=("kernel", "weight"),
        router=("mlp.router.linear", "mlp.gate"),
        experts={
            **{f"experts.{name}": f"mlp.experts.{name}_proj" for name in ("gate", "up", "gate_up", "down")},
            **{f"experts.{name}_bias": f"mlp.experts.{name}_proj_bias" for name in ("gate", "up", "gate_up", "down")},
        },
    ),
    late_norms=True,
    beside="weights",
)
LAYOUTS: Mapping[str, Layout] = {layout.name: layout for layout in (TUNIX, EASYDEL, BONSAI)}
