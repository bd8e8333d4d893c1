"""A ring holds the last W items, whatever they arrived in."""

import jax.numpy as jnp
import numpy as np
import pytest

from seqmoe_jax.models import ring


@pytest.mark.parametrize("chunks", [[1] * 11, [4, 4, 3], [11], [2, 1, 8], [16]])
def test_the_last_items_in_order(chunks):
    lengths = np.array([11, 6, 2])
    items = jnp.arange(1.0, 49.0).reshape(3, 16, 1)
    state, start = jnp.zeros((3, 4, 1)), 0
    for size in chunks:
        positions = jnp.broadcast_to(start + jnp.arange(size, dtype=jnp.int32), (3, size))
        state = ring.push(state, items[:, start : start + size], positions, positions < lengths[:, None])
        start += size
    latest = ring.ordered(state, jnp.asarray(lengths, jnp.int32))
    for row, length in enumerate(lengths):
        expected = [0.0] * max(0, 4 - length) + list(np.asarray(items[row, max(0, length - 4) : length, 0]))
        assert list(np.asarray(latest[row, :, 0])) == expected
