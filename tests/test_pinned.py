"""Memory of our own is what JAX computes with: the same bytes, for as long as an array needs them."""

import gc
import os
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmoe_jax import pinned
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.host_memory import host_view
from seqmoe_jax.pinned import fresh_pages, pinned_array


@jax.jit
def read_row(array, index):
    return jax.device_put(jax.lax.dynamic_index_in_dim(array, index, keepdims=False), jax.memory.Space.Device)


def array_of(value, rows=64, columns=4096):
    memory = fresh_pages(4 * rows * columns).view(np.uint32).reshape(rows, columns)
    memory[:] = value
    return pinned_array(memory, jax.devices()[0]), memory.ctypes.data


def test_an_array_is_the_memory_it_was_made_of_and_keeps_it():
    arrays = [array_of(value) for value in range(3)]
    gc.collect()
    for value, (array, address) in enumerate(arrays):
        assert array.unsafe_buffer_pointer() == address
        assert array.sharding.memory_kind == "pinned_host"
        assert set(np.asarray(read_row(array, jnp.int32(63))).tolist()) == {value}


def test_a_view_keeps_its_array_alive():
    view = host_view(array_of(3)[0])
    gc.collect()
    view[:] = 7
    assert view.sum(dtype=np.int64) == 7 * view.size


def test_pages_take_memory_when_they_are_written_and_give_it_back():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, size = resident(), 256 << 20
    pages = fresh_pages(size)
    assert not pages[:: 1 << 24].any()
    assert resident() - before < size / 4
    pages[:] = 1
    assert size * 0.95 < resident() - before < size * 1.05
    del pages
    assert resident() - before < size / 4


class Driver:
    """In the place of CUDA's."""

    calls: ClassVar[list] = []

    def __init__(self, device, **_):
        pass

    def enter(self):
        self.calls.append(("enter",))

    def call(self, name, *arguments):
        self.calls.append((name, *(getattr(argument, "value", argument) for argument in arguments)))

    def close(self):
        self.calls.append(("close",))


def test_pages_are_pinned_once_and_unpinned_when_the_last_array_over_them_goes(monkeypatch):
    monkeypatch.setattr(pinned, "Driver", Driver)
    monkeypatch.setattr(Driver, "calls", [])
    memory = fresh_pages(1 << 20).view(np.uint16).reshape(8, -1)
    pinned._pages_of(memory).pin(jax.devices()[0])
    # NumPy takes what JAX will, and does not mind that a device reads it too.
    taken = np.from_dlpack(pinned._Pinned(memory, jax.devices()[0]))
    assert taken.ctypes.data == memory.ctypes.data
    assert (taken.shape, taken.dtype) == (memory.shape, memory.dtype)
    registered = ("cuMemHostRegister_v2", memory.ctypes.data, 1 << 20, 1)
    assert Driver.calls == [("enter",), registered]
    address = memory.ctypes.data
    del memory
    gc.collect()
    assert Driver.calls == [("enter",), registered]
    del taken
    gc.collect()
    assert Driver.calls[2:] == [("enter",), ("cuMemHostUnregister", address), ("close",)]


def test_where_the_driver_does_not_pin_it_says_so(monkeypatch):
    class Refusing(Driver):
        def call(self, name, *arguments):
            raise ConfigError(f"{name} failed")

    monkeypatch.setattr(pinned, "Driver", Refusing)
    with pytest.raises(ConfigError, match="cuMemHostRegister_v2 failed"):
        pinned._pages_of(fresh_pages(1 << 20)).pin(jax.devices()[0])
    gc.collect()  # nothing is unpinned that never was
