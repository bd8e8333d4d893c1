from __future__ import annotations

import numpy as np
import pytest

from seqmoe_jax.traces.forecasts import Forecasts
from seqmoe_jax.traces.format import Trace
from tests.simulation.oracle import noisy_oracle
from tests.traces.conftest import excerpt as excerpt


@pytest.fixture(scope="session")
def short(excerpt) -> Trace:
    return excerpt.take(np.arange(3))


@pytest.fixture(scope="session")
def oracle(short) -> Forecasts:
    return noisy_oracle(short, flip=0.0, rollout=2, trigger=12)


@pytest.fixture(scope="session")
def noisy(short) -> Forecasts:
    return noisy_oracle(short, flip=0.3, rollout=2, trigger=12, refined_flip=0.02)
