"""What a family calls its tensors, as data. Names of ours are those of `ModelSpec.tensors` and of the expert layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MODEL = {"embed": "{root}embed_tokens.weight", "final_norm": "{root}norm.weight", "lm_head": "{top}lm_head.weight"}

# What most families call the parts of a layer, below `{root}layers.{index}.`.
LAYER = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    **{f"mixer.{name}": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"mixer.{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkvo"},
    "mixer.q_norm": "self_attn.q_norm.weight",
    "mixer.k_norm": "self_attn.k_norm.weight",
    "mixer.sinks": "self_attn.sinks",
    "router.weight": "mlp.gate.weight",
    **{f"mlp.{name}": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}


# What some families call what they have in addition.
CORRECTION = {"router.correction_bias": "mlp.gate.e_score_correction_bias"}
SHARED = {f"shared.{name}": f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")}


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names of experts' tensors below a layer.

    One per expert and matrix (`{expert}`), and where a checkpoint may have them so, fused over experts: gate and up
    `[E, 2F, H]` in that order, and down `[E, H, F]`. `split` is False where they only come fused, `interleaved` where
    gate has the even rows and up the odd ones, `transposed` where files have `[E, in, out]`.

    FP4 experts: one per expert with scales beside them, named by `scale_suffix`, or fused (never transposed) in
    `{name}_blocks` and `{name}_scales`. Biases are `{name}_bias` of the fused names.
    """

    split: bool = True
    interleaved: bool = False
    transposed: bool = False
    scale_suffix: tuple[str, str] = (".weight", ".scale")
    gate: str = "mlp.experts.{expert}.gate_proj.weight"
    up: str = "mlp.experts.{expert}.up_proj.weight"
    down: str = "mlp.experts.{expert}.down_proj.weight"
    fused_gate_up: str = "mlp.experts.gate_up_proj"
    fused_down: str = "mlp.experts.down_proj"


# Buffers that old files have, towers of models that also see or hear, and layers that predict further tokens.
IGNORED = (
    "*rotary_emb.inv_freq",
    *("*visual.*", "*vision_*", "*audio_*", "*multi_modal_projector.*", "*mm_projector.*"),
    *("mtp.*", "model.mtp.*"),
)
# Where those layers stand behind the last one, in the same names.
FURTHER = ("{root}layers.{layers}.*",)


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of a family. `ignored` are patterns of tensors that the model has no use for; `{layers}` is their count.

    `{root}` is what stands before the names of a decoder, and `{top}` before that of its head: "model." and nothing,
    but a checkpoint of the decoder alone has no root, and one of a model that also sees another, like
    "model.language_model.".
    """

    model: Mapping[str, str] = field(default_factory=lambda: MODEL)
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    prefix: str = "{root}layers.{index}."
    experts: ExpertNames = ExpertNames()
    ignored: tuple[str, ...] = IGNORED

    def below(self, root: str, top: str) -> Names:
        """The same names with `{root}` and `{top}` filled in."""

        def fill(name: str) -> str:
            return name.replace("{root}", root).replace("{top}", top)

        return replace(
            self,
            model={ours: fill(theirs) for ours, theirs in self.model.items()},
            prefix=fill(self.prefix),
            ignored=tuple(map(fill, self.ignored)),
        )
