"""The frozen description of a decoder. Everything after the reading of a `config.json` looks at this alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pallas_kernels.layout import FP4, SWIGLU, Activation, ExpertLayout, ScaleKind, swiglu_layout
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.models.mixers import Mixer
from seqmoe_jax.models.mlp import DenseSpec, DenseWeights, SharedSpec
from seqmoe_jax.models.norms import RMSNorm
from seqmoe_jax.models.quantization import Quantization
from seqmoe_jax.models.residual import PLAIN, HyperHead, Residual
from seqmoe_jax.models.routers import RouterSpec
from seqmoe_jax.models.tensors import Take, Tensor, Tensors, below, take_below
from seqmoe_jax.models.weights import LayerWeights, ModelWeights, MoEWeights


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Routed experts of `width`, and perhaps one that every token passes."""

    router: RouterSpec
    width: int
    activation: Activation = SWIGLU
    bias: bool = False  # of each expert's three projections
    shared: SharedSpec | None = None

    @property
    def num_experts(self) -> int:
        return self.router.num_experts

    @property
    def top_k(self) -> int:
        return self.router.top_k


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """`x = join(x, mixer(norm(x)))`, then `x = join(x, mlp(norm(x)))`, where the residual says how to join."""

    norm: RMSNorm
    mixer: Mixer
    mlp: DenseSpec | MoESpec
    residual: Residual = PLAIN

    def tensors(self, hidden: int) -> Tensors:
        tensors = {"input_norm": self.norm.tensor(hidden), "post_norm": self.norm.tensor(hidden)}
        tensors |= below("mixer", self.mixer.tensors(hidden))
        for half in ("mixer_residual", "mlp_residual"):
            tensors |= below(half, self.residual.tensors(hidden))
        if isinstance(self.mlp, DenseSpec):
            return tensors | below("mlp", self.mlp.tensors(hidden))
        tensors |= below("router", self.mlp.router.tensors(hidden))
        return tensors | (below("shared", self.mlp.shared.tensors(hidden)) if self.mlp.shared else {})

    def assemble(self, take: Take) -> LayerWeights:
        mlp: DenseWeights | MoEWeights
        if isinstance(self.mlp, DenseSpec):
            mlp = self.mlp.assemble(take_below("mlp", take))
        else:
            shared = self.mlp.shared.assemble(take_below("shared", take)) if self.mlp.shared else None
            mlp = MoEWeights(router=self.mlp.router.assemble(take_below("router", take)), shared=shared)
        return LayerWeights(
            input_norm=take("input_norm"),
            mixer=self.mixer.assemble(take_below("mixer", take)),
            post_norm=take("post_norm"),
            mlp=mlp,
            mixer_residual=self.residual.assemble(take_below("mixer_residual", take)),
            mlp_residual=self.residual.assemble(take_below("mlp_residual", take)),
        )


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything the program's shapes depend on. Hashable: a static argument of the jitted functions."""

    family: str
    vocab: int
    hidden: int
    context: int  # longest sequence the model was made for, in tokens
    norm: RMSNorm  # the last one
    tied: bool  # the output head is the embedding
    layers: tuple[LayerSpec, ...]
    dtype: np.dtype  # of the dense weights in the checkpoint
    expert_dtype: np.dtype  # of the experts' matrices in host pool and slots
    expert_scales: ScaleKind | None = None  # what of them a scale is of there: always for FP8
    quantization: Quantization | None = None  # what config.json says of the checkpoint's weights
    embedding_scale: float = 1.0  # embeddings are multiplied by it
    logits_scale: float = 1.0  # logits are divided by it
    head: HyperHead | None = None  # how streams of hidden states become one before the last norm; None: there is one

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have experts; their count is the L of every key."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mlp, MoESpec))

    @property
    def moe(self) -> MoESpec:
        """A MoE layer, for what all have in common: number and shape of experts.

        Raises `ConfigError` for a model without experts or with experts of several shapes.
        """
        layers = [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoESpec)]
        kinds = {(mlp.num_experts, mlp.top_k, mlp.width, mlp.activation, mlp.bias) for mlp in layers}
        if len(kinds) != 1:
            raise ConfigError(
                f"config.json: expected one kind of MoE layer, got {len(kinds)}; a dense model has nothing to offload"
            )
        return layers[0]

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of a token's hidden state between layers: `[H]`, or `[S, H]` with streams."""
        return (self.hidden,) if self.head is None else (self.head.streams, self.hidden)

    @property
    def num_keys(self) -> int:
        """L * E: how many experts the model has."""
        return len(self.moe_layers) * self.moe.num_experts

    @property
    def expert_layout(self) -> ExpertLayout:
        moe = self.moe
        # Biases of quantised experts are in the files' dtype of dense weights.
        bias = self.dtype if self.expert_dtype == FP4 or self.expert_scales else self.expert_dtype
        return swiglu_layout(
            hidden=self.hidden,
            width=moe.width,
            dtype=self.expert_dtype,
            scales=self.expert_scales,
            activation=moe.activation,
            bias=bias if moe.bias else None,
        )

    def tensors(self) -> Tensors:
        """All dense tensors by canonical name: `embed`, `final_norm`, `lm_head`, and below `layers.{i}.` those of
        the layer's parts."""
        tensors = {"embed": Tensor(shape=(self.vocab, self.hidden)), "final_norm": self.norm.tensor(self.hidden)}
        if not self.tied:
            tensors["lm_head"] = Tensor(shape=(self.vocab, self.hidden))
        if self.head is not None:
            tensors |= below("head", self.head.tensors(self.hidden))
        for index, layer in enumerate(self.layers):
            tensors |= below(f"layers.{index}", layer.tensors(self.hidden))
        return tensors

    def assemble(self, take: Take) -> ModelWeights:
        """The tree that the programs take, from the tensors by canonical name."""
        layers = tuple(layer.assemble(take_below(f"layers.{index}", take)) for index, layer in enumerate(self.layers))
        embed = take("embed")
        head = embed if self.tied else take("lm_head")
        streams = None if self.head is None else self.head.assemble(take_below("head", take))
        return ModelWeights(embed=embed, layers=layers, norm=take("final_norm"), head=head, streams=streams)
