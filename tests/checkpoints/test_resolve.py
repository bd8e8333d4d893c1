"""Where a model's directory comes from, without a network."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from seqmoe_jax.checkpoints import resolve
from seqmoe_jax.checkpoints.resolve import read_config, resolve_model
from seqmoe_jax.errors import CheckpointError, ConfigError


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert resolve_model(tmp_path) == resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model("owner/name") == Path("owner/name")


def test_neither_directory_nor_id(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="got a file"):
        resolve_model(tmp_path / "file")
    for model in ("/no/such/place", "a/b/c", "name", "../x", Path("owner/name"), ""):
        with pytest.raises(CheckpointError, match="got no such directory"):
            resolve_model(model)


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resolve.resources, "files", lambda package: tmp_path)
    with pytest.raises(CheckpointError, match="expected the demo model"):
        resolve_model("demo")
    (tmp_path / "demo").mkdir()
    assert resolve_model("demo") == tmp_path / "demo"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local cache that holds `owner/name`, and a hub that cannot be reached."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")

    def download(model: str, *, local_files_only: bool = False, allow_patterns: list[str]) -> str:
        assert "*.safetensors" in allow_patterns
        if not local_files_only:
            raise ConnectionError("no route\nto host")
        if model != "owner/name":
            raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return snapshot


def test_from_the_local_cache(cache: Path):
    (cache / "model.safetensors").write_bytes(b"")
    assert resolve_model("owner/name") == cache


def test_offline_and_not_cached(cache: Path):
    with pytest.raises(CheckpointError) as caught:
        resolve_model("owner/other")
    line = str(caught.value)
    assert line.startswith(
        "owner/other: expected it in the local Hugging Face cache or on the Hub, got no route to host"
    )
    assert "hf download" in line
    assert "\n" not in line


@pytest.mark.parametrize("index", ['{"weight_map": {"a": "x.safetensors"}}', "{}", "[]", '{"weight_map": 3}'])
def test_half_a_download_is_not_taken_from_the_cache(cache: Path, index: str):
    (cache / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="no route to host"):
        resolve_model("owner/name")


def test_read_config(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such file"):
        read_config(tmp_path)
    for content, words in ((b"{", "UTF-8 JSON"), (b"\xff", "UTF-8 JSON"), (b"[]", "a JSON object, got a list")):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=words) as caught:
            read_config(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    assert read_config(str(tmp_path)) == {"hidden_size": 4}
