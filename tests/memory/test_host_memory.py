"""How much memory a process may have is read off the machine, and a model that needs more is refused beforehand."""

import pytest

import seqmoe_jax
from seqmoe_jax.cli.main import main
from seqmoe_jax.errors import ResidencyError
from seqmoe_jax.experts import host_pool
from seqmoe_jax.host_memory import HostMemory, host_memory
from seqmoe_jax.memory import fit, report

GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a machine of 32 GiB, with what is given beside it, and asks it."""
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 32 * GIB // 4096}.get)

    def asked(*, present=32.5, free=20, groups=(), group="/", devices=()):
        zones = [int(part * GIB) // 4096 for part in (4, present - 4)]
        files = {
            "proc/meminfo": f"MemTotal:    {32 * GIB // 1024} kB\nMemAvailable:  {free * GIB // 1024} kB\nPages:  0\n",
            "proc/zoneinfo": "".join(f"Node 0\n        present  {pages}\n" for pages in zones),
            "proc/self/cgroup": f"0::{group}\n",
            **{f"sys/fs/cgroup/{name}memory.max": f"{limit}\n" for name, limit in groups},
            **{f"sys/bus/virtio/drivers/virtio_{device}/virtio0": "" for device in devices},
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return host_memory(tmp_path)

    return asked


def test_a_machine_has_what_it_says(machine):
    found = machine()
    assert found.total == pytest.approx(32.5 * GIB)
    assert found.available == 20 * GIB


def test_a_machine_that_grows_is_not_held_to_what_it_has_so_far(machine):
    inflated = machine(present=256, devices=["balloon"])
    assert (inflated.total, inflated.available) == (256 * GIB, None)
    assert machine(devices=["balloon"]).available == 20 * GIB  # an empty one
    assert machine(devices=["mem"]) == HostMemory(total=None, available=None)


def test_a_control_group_has_the_last_word(machine):
    assert machine(groups=[("", 8 * GIB)]).total == 8 * GIB
    assert machine(groups=[("", "max")]).total > 32 * GIB
    nested = [("a/", 9 * GIB), ("a/b/", "max"), ("c/", 1)]
    assert machine(groups=[("", "max"), *nested], group="/a/b").total == 9 * GIB
    assert machine(groups=[("", 8 * GIB), *nested], group="/a/b").total == 8 * GIB


def test_elsewhere_there_is_what_the_system_says(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.get)
    assert host_memory(tmp_path) == HostMemory(total=4096000, available=None)


def test_what_lacks_is_said_with_both_numbers():
    memory = HostMemory(total=100 * 10**9, available=10**9)
    assert memory.lacks(10**9, "the experts") is None
    assert memory.lacks(2 * 10**9, "the experts") == "the experts need 2.00 GB of host memory, free are 1.00 GB"
    assert "there are 100.00 GB" in memory.lacks(200 * 10**9, "the experts")
    assert HostMemory(total=None, available=None).lacks(10**15, "the experts") is None


@pytest.fixture
def small_host(monkeypatch):
    """No room for a byte more than 4 GB; whoever takes memory for experts nevertheless fails."""
    for module in (fit, report):
        monkeypatch.setattr(module, "host_memory", lambda: HostMemory(total=4 * 10**9, available=None))
    monkeypatch.setattr(host_pool, "fresh_pages", lambda nbytes: pytest.fail("memory was taken"))
    monkeypatch.setattr("seqmoe_jax.loading.random_weights", lambda *_, **__: pytest.fail("weights were made"))


def test_a_model_that_the_host_cannot_hold_is_refused_before_anything_is_allocated(small_host, capsys):
    words = "the experts need 6.04 GB of host memory, there are 4.00 GB"
    with pytest.raises(ResidencyError, match=words):
        seqmoe_jax.load("granite-3.0-3b-a800m", random_weights=True)
    assert main(["bench", "granite-3.0-3b-a800m"]) == 2
    assert words in capsys.readouterr().err
    assert main(["plan", "granite-3.0-3b-a800m"]) == 1
    assert f"it does not fit: {words}" in capsys.readouterr().out


def test_so_is_one_that_the_device_cannot(small_host, monkeypatch):
    monkeypatch.setattr(fit, "host_memory", lambda: HostMemory(total=None, available=None))
    monkeypatch.setattr(fit, "free_bytes", lambda device: 10**9)
    with pytest.raises(ResidencyError, match=r"1\.00 GB of device memory is not enough"):
        seqmoe_jax.load("granite-3.0-3b-a800m", random_weights=True)
