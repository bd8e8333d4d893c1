"""What hash-routed layers will do is known with the token: the forecast says exactly that, and nothing less."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.plan_tasks import CONFIDENCE, CONFIDENCE_UNIT, KEY
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.forecast.forecaster import known_routing
from seqmoe_jax.loading import random_model
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.prefetch.device_put import DevicePut
from seqmoe_jax.testing import untrained_predictor

pytest.importorskip("flax.nnx")

PROMPT, NEW, HASHED = [3, 1, 4, 1, 5], 20, 1
# A DeepSeek-V4 of plain windows: one hash-routed layer, one routed by score.
CONFIG = dict(
    model_type="deepseek_v4", vocab_size=256, hidden_size=64, num_attention_heads=4, max_position_embeddings=256,
    num_hidden_layers=2, num_experts_per_tok=3, compress_ratios=[0, 0], num_hash_layers=HASHED, num_key_value_heads=1,
    head_dim=32, qk_rope_head_dim=8, q_lora_rank=32, o_groups=2, o_lora_rank=16, moe_intermediate_size=32,
    n_routed_experts=8, n_shared_experts=1, sliding_window=8, torch_dtype="float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, name="tiny-v4")


@pytest.mark.parametrize("predictor", [None, "untrained"])
def test_forecast_rows_of_hashed_layers_are_what_the_next_step_routes(model, predictor, monkeypatch):
    monkeypatch.setattr("seqmoe_jax.lanes.RUN_AHEAD", 1)  # so that the engine's state is that of the last token
    engine = TokenEngine(
        model, EngineOptions(residency=0.4), predictor=untrained_predictor(model) if predictor else None
    )
    tokens, forecasts = [], []
    for event in engine.run([PROMPT], max_new_tokens=NEW):
        tokens.append(event.token)
        forecasts.append(np.array(engine.offloading.state.forecast.probability).reshape(2, 8))
    assert len(set(tokens)) > 3
    [(ids, _)] = engine.routing([PROMPT + tokens])
    engine.close()
    # Nothing is forecast at the end of the prompt, and nothing comes after the last token.
    for forecast, routed in zip(forecasts[1:-1], ids[len(PROMPT) + 1 : -1], strict=True):
        exact = np.zeros(8)
        exact[routed[0]] = 1
        np.testing.assert_array_equal(forecast[0], exact)
        assert (not forecast[1].any()) == (predictor is None)  # of the other layer only a predictor says something


def test_a_plan_for_the_coming_step_names_of_hashed_layers_what_it_routes_and_nothing_else(model, monkeypatch):
    monkeypatch.setattr(DevicePut, "ahead", 1)  # as `dma` plans, which needs a GPU
    engine = TokenEngine(
        model,
        EngineOptions(residency=0.7, transfers="device_put", threshold=0.01),
        predictor=untrained_predictor(model),
    )
    plans, deliver = [], engine.transfers.deliver

    def listen(tasks, clock):
        plans.append(np.array(tasks))
        deliver(tasks, clock)

    monkeypatch.setattr(engine.transfers, "deliver", listen)
    tokens = [event.token for event in engine.run([PROMPT], max_new_tokens=NEW)]
    [(ids, _)] = engine.routing([PROMPT + tokens])
    planned = 0
    # The step that processes new token i plans for that of i + 1; nothing comes after the last but one.
    for plan, routed in zip(plans[: NEW - 2], ids[len(PROMPT) + 1 :], strict=False):
        hashed = (plan[KEY] >= 0) & (plan[KEY] < 8 * HASHED) & (plan[CONFIDENCE] > 0)
        assert set(plan[KEY, hashed]) <= set(routed[0])
        assert (plan[CONFIDENCE, hashed] == CONFIDENCE_UNIT).all()
        planned += hashed.sum()
    assert planned > 0


def test_only_sequences_that_go_on_count():
    tables = {1: jnp.array([[0, 1], [2, 3], [4, 0]], jnp.int32)}
    probability = jnp.full((2, 5), 0.5)
    known = known_routing(probability, tables, jnp.array([0, 1, 2]), jnp.array([True, False, True]))
    np.testing.assert_array_equal(known, [[0.5] * 5, [1, 1, 0, 0, 1]])
