"""Files of forecasts: what is written is read back, and a file of another kind is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from seqmoe_jax.errors import TraceError
from seqmoe_jax.traces.first_order import FirstOrder
from seqmoe_jax.traces.forecasts import Forecasts, read_forecasts, write_forecasts


@pytest.fixture(scope="module")
def forecasts(excerpt) -> Forecasts:
    some = FirstOrder.fit(excerpt).forecasts(excerpt, rollout=1)
    return dataclasses.replace(some, trigger=12, refined=some.next, name="ours")


def test_round_trip(tmp_path, excerpt, forecasts):
    write_forecasts(tmp_path / "f.npz", forecasts)
    copy = read_forecasts(tmp_path / "f.npz", excerpt)
    assert (copy.name, copy.trigger, copy.early) == ("ours", 12, None)
    for name in ("next", "refined", "retention", "rollout"):
        assert np.array_equal(getattr(copy, name), getattr(forecasts, name))


def test_faults_of_a_file(tmp_path, excerpt, forecasts):
    with pytest.raises(TraceError, match="expected a file of forecasts, got no such file"):
        read_forecasts(tmp_path / "f.npz")
    write_forecasts(tmp_path / "f.npz", forecasts)
    with pytest.raises(TraceError, match=r"f.npz: the forecasts are for another trace"):
        read_forecasts(tmp_path / "f.npz", excerpt.take(np.arange(2)))
    np.savez(tmp_path / "f.npz", refined=forecasts.refined)
    with pytest.raises(TraceError, match="missing next"):
        read_forecasts(tmp_path / "f.npz")
    np.savez(tmp_path / "f.npz", next=forecasts.next.astype(np.float32))
    with pytest.raises(TraceError, match="next is float32 of 3 dimensions, expected float16 of 3"):
        read_forecasts(tmp_path / "f.npz")
