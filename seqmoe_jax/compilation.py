"""The persistent compilation cache: on by default, so that only the first run of a model waits for the compiler."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from seqmoe_jax.errors import ConfigError

VARIABLE = "SEQMOE_CACHE_DIR"


def cache_directory() -> Path:
    """`$SEQMOE_CACHE_DIR`, else `$XDG_CACHE_HOME/seqmoe_jax`, else `~/.cache/seqmoe_jax`."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "seqmoe_jax"


def enable_compilation_cache() -> Path | None:
    """Turns it on and returns its directory; leaves a cache that the user has configured in JAX alone (None).

    Raises `ConfigError` where the directory cannot be written.
    """
    directory = cache_directory() / "xla"
    configured = jax.config.values["jax_compilation_cache_dir"]
    if configured is not None:
        return directory if configured == str(directory) else None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{directory}: cannot write the compilation cache ({error.strerror}); "
            f"set {VARIABLE} to a writable directory"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    return directory
