"""A model directory as transformers reads it, and as this package does."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from checkpoints import NEW, PROMPT
from directories import DIFFERENT, EQUAL, REFUSED, UNREADABLE, Variant, Verdict

from pallas_kernels.fused_moe.swiglu import activate, unpack_weight
from seqmoe_jax.errors import SeqMoEError
from seqmoe_jax.loading import load_model
from seqmoe_jax.models import block
from seqmoe_jax.models.mlp import DenseSpec
from seqmoe_jax.models.model import Model
from seqmoe_jax.models.spec import LayerSpec, MoESpec

transformers.utils.logging.set_verbosity(transformers.logging.CRITICAL)
torch.set_num_threads(1)  # of tiny models; other processes have work too
TOLERANCE = 1e-3  # of logits, of order 10


class UnreadableError(Exception):
    """transformers does not read the directory, or not all of it."""


def theirs(directory: Path, tokens: list[int] | None = None) -> tuple[list[int], np.ndarray]:
    """PROMPT and NEW greedy tokens (unless some are given), and the logits at every position, in float32."""
    try:
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
            output_loading_info=True,
        )  # fmt: skip
        lost = {name: which for name, which in loaded.items() if which and name != "unexpected_keys"}
        if lost:
            raise UnreadableError(f"{lost}")
        model.eval()
        model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        with torch.no_grad():
            ids = torch.tensor([tokens or PROMPT])
            if tokens is None:
                ids = model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
            logits = model(ids, use_cache=False).logits[0].numpy()
    except UnreadableError:
        raise
    except Exception as error:  # whatever it raises for what it cannot read
        raise UnreadableError(f"{type(error).__name__}: {error}") from error
    if not np.isfinite(logits).all():
        raise UnreadableError("its logits are not finite")
    return ids[0].tolist(), logits


def ours(directory: Path, tokens: list[int]) -> np.ndarray:
    """The logits at every position of `tokens`. Raises `SeqMoEError`."""
    return logits_of(load_model(directory)[0], tokens)


def logits_of(model: Model, tokens: list[int]) -> np.ndarray:
    """One pass over all tokens, layer by layer and with all experts at once.

    Programs are compiled for parts of the model, so that a variant compiles only what is new in it. What engines make
    of a model is compared in `tests/families`.
    """
    spec = model.spec
    ids = jnp.asarray([tokens], jnp.int32)
    positions, valid = jnp.arange(len(tokens))[None], jnp.ones((1, len(tokens)), bool)
    x = block.embed(ids, model.weights.embed, spec)
    pools = iter(model.pools)
    for layer, weights in zip(spec.layers, model.weights.layers, strict=True):
        x = _mix(x, positions, valid, weights, layer=layer, length=len(tokens))
        if isinstance(layer.mlp, DenseSpec):
            x = _dense(x, weights, layer=layer)
        else:
            matrices, biases = _experts(np.asarray(next(pools)), layout=spec.expert_layout)
            x = _moe(x, ids[0], weights, matrices, biases, layer=layer)
    return np.asarray(_head(x[0], model.weights, spec=spec))


@partial(jax.jit, static_argnames=("layer", "length"))
def _mix(x, positions, valid, weights, *, layer: LayerSpec, length: int):
    state = layer.mixer.init_state(1, length, x.dtype)
    return block.mix(x, state, positions, valid, weights, layer)[0]


@partial(jax.jit, static_argnames="layer")
def _dense(x, weights, *, layer: LayerSpec):
    return block.dense(x, weights, layer)


@partial(jax.jit, static_argnames="layout")
def _experts(pool, *, layout):
    names = ("gate", "up", "down")
    matrices = {name: jax.vmap(lambda one, name=name: unpack_weight(one, layout, name))(pool) for name in names}
    biases = {name: layout.unpack(pool, f"{name}_bias").astype(jnp.float32) for name in names if layout.biased}
    return matrices, biases


@partial(jax.jit, static_argnames="layer")
def _moe(x, tokens, weights, matrices, biases, *, layer: LayerSpec):
    assert isinstance(layer.mlp, MoESpec)
    normed, mixing = block.moe_input(x, weights, layer)
    ids, scale = layer.mlp.router(normed, tokens, weights.mlp.router)
    with jax.default_matmul_precision("highest"):
        gate, up = (
            jnp.einsum("th,efh->tef", normed, matrices[name]) + biases.get(name, 0.0) for name in ("gate", "up")
        )
        y = jnp.einsum("tef,ehf->teh", activate(gate, up, layer.mlp.activation), matrices["down"])
    y = y + biases.get("down", 0.0)
    routed = (jnp.take_along_axis(y, ids[..., None], axis=1) * scale[..., None]).sum(axis=1)
    return block.moe_output(x, normed, mixing, routed, weights, layer)


@partial(jax.jit, static_argnames="spec")
def _head(x, weights, *, spec):
    return block.logits_of(x, weights, spec)


def compare(variant: Variant, base: Path, tokens: list[int] | None = None) -> Verdict:
    """Writes the variant of `base` into a directory of its own and has it read twice.

    The tokens must be those that transformers chooses, after its own or, where `tokens` are given, after each of these;
    logits must be the same within `TOLERANCE`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        directory = variant.make(base, Path(scratch) / "model")
        try:
            model = load_model(directory)[0]
        except SeqMoEError as error:
            line = str(error)
            fault = "\n" in line or (variant.words and not any(word in line for word in variant.words))
            return Verdict(variant=str(variant), kind=DIFFERENT if fault else REFUSED, reason=line)
        try:
            tokens, expected = theirs(directory, tokens)
        except UnreadableError as error:
            return Verdict(variant=str(variant), kind=UNREADABLE, reason=str(error))
    logits = logits_of(model, tokens)
    greedy, chosen = (values[len(PROMPT) - 1 :].argmax(axis=-1) for values in (logits, expected))
    away = float(np.abs(logits - expected).max())
    if not np.array_equal(greedy, chosen) or not away <= TOLERANCE:
        same = f"{(greedy == chosen).sum()} tokens of {len(chosen)}"
        return Verdict(variant=str(variant), kind=DIFFERENT, reason=f"{same}, logits within {away:.3g}")
    return Verdict(variant=str(variant), kind=EQUAL, reason=f"{away:.2g}")
