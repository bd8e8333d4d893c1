"""Offloaded experts inside a zoo's model and its own jitted decode: the same tokens, one pool of slots, no copies of
it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import seqmoe_jax as sm
from tests.zoo.models import FilesConfig, GptOssForCausalLM, MixtralForCausalLM, Qwen3, TunixConfig

LENGTH = 24
PROMPT = [5, 17, 3, 80, 44, 9, 61, 2, 33, 7]  # more than are decoded at once


def tunix(**changes):
    return Qwen3(replace(TunixConfig(num_layers=2), **changes), rngs=nnx.Rngs(1))


def step(model, tokens, cache, at):
    """A zoo's decode: new tokens behind `at` others, each seeing itself and what was before it."""
    positions = at + jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    mask = positions[:, :, None] >= jnp.arange(LENGTH)
    logits, cache = model(tokens, positions, cache, mask)
    return logits[:, -1].argmax(-1), cache


jitted = nnx.jit(step, donate_argnums=(0, 2))


def decode(model, prompts, count=10, step=jitted):
    cache = model.init_cache(len(prompts), LENGTH, jnp.float32)
    tokens, at, out = jnp.array(prompts), 0, []
    for _ in range(count):
        new, cache = step(model, tokens, cache, jnp.int32(at))
        at, tokens = at + tokens.shape[1], new[:, None]
        out.append(np.asarray(new))
    return np.stack(out, 1).tolist()


@pytest.fixture(scope="module")
def wanted():
    return decode(tunix(), [PROMPT])


@pytest.fixture(scope="module")
def offloaded():
    """A model at 45 %, and its slots."""
    model = tunix()
    return model, sm.nnx.offload(model, residency=0.45)


def test_tokens_are_those_of_the_blocks_it_replaces(offloaded, wanted):
    model, slots = offloaded
    assert all(type(layer.mlp) is sm.nnx.OffloadedMoE for layer in model.layers)
    assert decode(model, [PROMPT]) == wanted
    assert slots.config.slots == 7
    assert slots.counts["routed"] == slots.counts["hits"] + slots.counts["loaded"] > slots.counts["loaded"] > 0


@pytest.mark.slow
def test_the_least_is_k_slots_for_all_layers_together(wanted):
    model = tunix()
    slots = sm.nnx.offload(model, residency="least")
    assert slots.config.slots == 2
    assert decode(model, [PROMPT]) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("residency", ["least", 0.45, 1.0])
def test_so_they_are_for_several_sequences_at_every_residency(residency):
    prompts, model = [PROMPT, PROMPT[::-1], PROMPT[3:] + PROMPT[:3]], tunix()
    wanted = decode(tunix(), prompts)
    slots = sm.nnx.offload(model, residency=residency, policy="lfu")
    assert decode(model, prompts) == wanted
    assert (slots.hit_rate == 1.0) == (residency == 1.0)


def test_the_slots_are_updated_in_place_and_shared_by_all_layers(offloaded):
    model, slots = offloaded
    decode(model, [PROMPT], 2)
    where = slots.state.get_value().cache.blocks.unsafe_buffer_pointer()
    pools = [layer.mlp.experts.get_value().unsafe_buffer_pointer() for layer in model.layers]
    decode(model, [PROMPT], 4)
    assert slots.state.get_value().cache.blocks.unsafe_buffer_pointer() == where
    assert [layer.mlp.experts.get_value().unsafe_buffer_pointer() for layer in model.layers] == pools
    assert all(layer.mlp.experts.get_value().sharding.memory_kind == "pinned_host" for layer in model.layers)
    assert all(layer.mlp.slots is slots for layer in model.layers)
    resident = np.asarray(slots.state.get_value().cache.tables.key_of_slot) // slots.config.experts
    assert set(resident) == {0, 1}


def test_a_program_that_does_not_donate_is_refused(offloaded, wanted):
    model, _ = offloaded
    with pytest.raises(sm.EngineError, match=r"donates the model.*copied all 7 of them.*donate_argnums=0"):
        decode(model, [[5]], 2, nnx.jit(step))
    graph, state = nnx.split(model)

    @jax.jit
    def pure(state, *rest):
        model = nnx.merge(graph, state)
        out = step(model, *rest)
        return out, nnx.state(model)

    _, state = pure(state, jnp.array([[5]]), model.init_cache(1, LENGTH, jnp.float32), jnp.int32(0))
    nnx.update(model, state)
    with pytest.raises(sm.EngineError, match="donates the model"):
        nnx.split(model)
    with pytest.raises(sm.EngineError, match=r"loop.*nnx\.fori_loop"):
        jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: model.layers[0].mlp(x), x))(jnp.ones((1, 1, 32)))
    assert decode(model, [PROMPT]) == wanted  # what was refused has broken nothing


@pytest.mark.slow
def test_a_program_that_holds_the_model_is_watched_too(offloaded, wanted):
    model, _ = offloaded
    held, copying = nnx.cached_partial(jitted, model), nnx.cached_partial(nnx.jit(step), model)
    assert decode(model, [PROMPT], step=lambda _, *rest: held(*rest)) == wanted
    with pytest.raises(sm.EngineError, match="donates the model"):
        decode(model, [[5]], 4, lambda _, *rest: copying(*rest))
    assert decode(model, [PROMPT]) == wanted


@pytest.mark.slow
def test_it_works_outside_of_a_program_too(offloaded, wanted):
    model, slots = offloaded
    at, x = slots.state.get_value().cache.blocks.unsafe_buffer_pointer(), jnp.ones((1, 1, 32))
    np.testing.assert_allclose(model.layers[1].mlp(x), tunix().layers[1].mlp(x), rtol=2e-5, atol=2e-5)
    assert slots.state.get_value().cache.blocks.unsafe_buffer_pointer() == at
    assert decode(model, [PROMPT]) == wanted


@pytest.mark.slow
def test_a_loop_of_nnx_takes_the_model_along(offloaded, wanted):
    model, _ = offloaded

    @partial(nnx.jit, donate_argnums=(0, 2))
    def ahead(model, token, cache, at):
        def body(index, carry):
            model, token, cache = carry
            token, cache = step(model, token[:, None], cache, at + index)
            return model, token, cache

        return nnx.fori_loop(0, 3, body, (model, token, cache))[1:]

    cache = model.init_cache(1, LENGTH, jnp.float32)
    token, cache = jitted(model, jnp.array([PROMPT]), cache, jnp.int32(0))
    token, _ = ahead(model, token, cache, jnp.int32(len(PROMPT)))
    assert token.tolist() == [wanted[0][3]]


def test_a_predicate_names_the_layers():
    model = tunix()
    seen = []

    def where(path, block):
        seen.append((path, type(block).__name__))
        return path.endswith("1.mlp")

    slots = sm.nnx.offload(model, residency=0.5, where=where)
    assert seen == [(f"layers.{i}.mlp", "TunixMoE") for i in range(2)]
    assert [type(layer.mlp).__name__ for layer in model.layers] == ["TunixMoE", "OffloadedMoE"]
    assert (slots.config.layers, slots.config.slots, slots.residency) == (1, 4, 0.5)
    with pytest.raises(sm.ConfigError, match=r"at least one of the 2 MoE blocks \(layers.0.mlp"):
        sm.nnx.offload(tunix(), where=lambda path, block: False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout", "block", "config"),
    [
        (MixtralForCausalLM, "easydel", "block_sparse_moe", FilesConfig()),
        (GptOssForCausalLM, "bonsai", "mlp", FilesConfig(attention_bias=True, sliding_window=4)),
    ],
    ids=["easydel", "bonsai"],
)
def test_what_a_block_returns_beside_its_output_stays(kind, layout, block, config):
    model, x = kind(config, rngs=nnx.Rngs(3)), jax.random.normal(jax.random.key(0), (2, 3, 32))
    mine = getattr(model.model.layers[1], block)
    wanted = mine(x), (mine.gate(x) if layout == "easydel" else mine.weights(x)).reshape(6, 8)
    sm.nnx.offload(model, layout, residency=0.45)
    got = getattr(model.model.layers[1], block)(x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, wanted)


def test_what_does_not_fit_is_refused_and_nothing_has_changed():
    model = tunix()
    for arguments, error, said in [
        (dict(residency=0.1), sm.ResidencyError, r"1 of 16 experts.*least is 2 slots"),
        (dict(policy="seqmoe"), sm.ConfigError, "one of lru, lfu"),
        (dict(residency=2.0), sm.ConfigError, "residency must be in"),
        (dict(config={"num_experts": 9}), sm.CheckpointError, r"mlp.gate_proj \[8, 32, 16\] for \[9, 32, 16\]"),
    ]:  # fmt: skip
        with pytest.raises(error, match=said):
            sm.nnx.offload(model, **arguments)
    assert [type(layer.mlp).__name__ for layer in model.layers] == ["TunixMoE"] * 2
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(nnx.state(model)))
