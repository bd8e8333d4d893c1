"""After a warm-up nothing is compiled, whatever is asked for."""

import random

import jax
import pytest

from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.lanes import TokenRequest
from seqmoe_jax.options import EngineOptions, SamplingConfig
from seqmoe_jax.testing import tiny_model, untrained_predictor


def compilations():
    compiled = []

    def note(name, *_, **__):
        if "backend_compile" in name:
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    return compiled


@pytest.mark.parametrize("transfers", ["none", pytest.param("device_put", marks=pytest.mark.slow)])
def test_nothing_is_compiled_after_it(transfers):
    model = tiny_model(num_hidden_layers=2, mlp_only_layers=[])
    options = EngineOptions(residency=0.7, max_batch=2, context=64, transfers=transfers)
    engine, told = TokenEngine(model, options, predictor=untrained_predictor(model)), []
    engine.warm_up(lambda done, of: told.append((done, of)))
    assert told[-1][0] == told[-1][1] > 20
    draw, compiled = random.Random(0), compilations()
    for _ in range(6):
        session = engine.session()
        for _ in range(draw.randrange(1, 6)):
            length = draw.randrange(1, 60)
            how = SamplingConfig(temperature=draw.choice((0.0, 0.5)), seed=draw.randrange(9))
            new = draw.randrange(1, min(20, 65 - length))
            numbers = session.add(TokenRequest(prompt=[7] * length, max_new_tokens=new, sampling=how))
        for _ in session.events:
            if draw.random() < 0.05:
                session.drop(numbers)
    assert compiled == []
