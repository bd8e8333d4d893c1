"""Every bench of kernels checks and times what it is asked for, here in a tiny shape and interpreted."""

from __future__ import annotations

import importlib
import json

import pytest

TINY = "--shapes tiny --batches 2 --layers 1 --rounds 1 --in-flight 1 --interpret"
PARTS = {
    "moe": ("decode on-demand prefill", "--gigabytes 0"),
    "decode": ("matvec attention router", ""),
    "cache": ("launch layers link", "--trials 1 --block-bytes 1024 --link-bytes 1024"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_bench_checks_and_times_all_its_parts(name, tmp_path):
    parts, more = PARTS[name]
    out = tmp_path / "report.json"
    bench = importlib.import_module(f"scripts.kernels.{name}")
    assert bench.main([*TINY.split(), *more.split(), "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    rows = [row for part in parts.split() for row in report[part]]
    assert not [row for row in rows if "failed" in row]
    assert all(row["us"] > 0 for row in rows)
    assert any("error" in row for row in rows)


def test_a_wrong_result_fails_the_bench(monkeypatch):
    from scripts.kernels import harness, moe

    monkeypatch.setattr(moe, "compare", lambda *_, tolerance: harness.difference([1.0], [2.0], tolerance))
    assert moe.main([*TINY.split(), "--parts", "decode", "--gigabytes", "0"]) == 1


def test_without_a_gpu_nothing_is_timed(capsys):
    from scripts.kernels import cache

    assert cache.main([]) == 2
    assert "needs a GPU, JAX found cpu" in capsys.readouterr().err
