"""No reader does anything but read its input or refuse it in one line, whatever the input.

A few hundred inputs here, always the same. `python -m tests.hostile` goes on as long as it is told to, and the slow
test for SEQMOE_HOSTILE_MINUTES, an hour if that is not set.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from seqmoe_jax.errors import CheckpointError, ConfigError
from seqmoe_jax.fields import Fields
from seqmoe_jax.inputs import parse_json
from seqmoe_jax.loading import load_model
from tests.hostile.__main__ import survey
from tests.hostile.harness import Count, try_many
from tests.hostile.over_http import http_readers
from tests.hostile.readers import readers, tiny_directory

INPUTS = 40  # of a reader with a share of 1


def check(reader):
    count = try_many(reader, max(3, round(INPUTS * reader.share)))
    assert not count.failed
    return count


def test_files(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tiktoken")
    counts = {reader.name: check(reader) for reader in readers(tmp_path)}
    everything = Count(read=sum(c.read for c in counts.values()), refused=sum(c.refused for c in counts.values()))
    assert everything.read > 20, "most inputs are so bad that they reach nothing"
    assert everything.refused > 100, "most inputs are not bad"


def test_requests():
    with http_readers() as over_http:
        for reader in over_http:
            check(reader)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.input_layernorm.weight"])
def test_a_norm_that_is_not_finite_is_named(tmp_path, name):
    directory = tiny_directory(tmp_path / "model")
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            save_file(tensors | {name: np.frombuffer(b"\xff" * tensors[name].nbytes, np.float32)}, path)
    with pytest.raises(CheckpointError, match=f"finite numbers in '{name}'"):
        load_model(directory)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary() | st.text())
def test_any_bytes_are_json_or_refused(data):
    try:
        parse_json(data, "there")
    except ConfigError as error:
        assert str(error).isprintable()  # noqa: PT017


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JSON)
def test_any_value_of_a_field_is_of_its_type_or_refused(value):
    fields = Fields({"x": value})
    kinds = {"size": int, "count": int, "number": float, "flag": bool, "text": str, "ints": tuple, "numbers": tuple,
             "texts": tuple, "group": Fields}  # fmt: skip
    for name, kind in kinds.items():
        try:
            assert type(getattr(fields, name)("x")) is kind or value is None
        except ConfigError as error:
            assert str(error).isprintable()  # noqa: PT017


@pytest.mark.slow
def test_readers_for_long():
    minutes = float(os.environ.get("SEQMOE_HOSTILE_MINUTES", "60"))
    assert [line for count in survey(minutes).values() for line in count.failed] == []
