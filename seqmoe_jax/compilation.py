"""The persistent compilation cache: on by default, so that only the first run of a model waits for the compiler."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.outputs.files import partial_name

VARIABLE = "SEQMOE_CACHE_DIR"


def cache_directory() -> Path:
    """`$SEQMOE_CACHE_DIR`, else `$XDG_CACHE_HOME/seqmoe_jax`, else `~/.cache/seqmoe_jax`.

    Raises `ConfigError` where the variable is empty, or where there is no home directory.
    """
    given = os.environ.get(VARIABLE)
    if given is not None and not given.strip():  # as a path it would be the current directory
        raise ConfigError(f"{VARIABLE} is empty: set it to a directory, or unset it")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if given is not None:
            return Path(given).expanduser().absolute()
        return (Path(base) if base else Path.home() / ".cache") / "seqmoe_jax"
    except RuntimeError as error:  # a user that the system does not know, as in containers
        raise ConfigError(f"no directory for the compilation cache ({error}); set {VARIABLE} to one") from None


def enable_compilation_cache() -> Path | None:
    """Turns it on and returns its directory; leaves a cache that the user has configured in JAX alone (None).

    Raises `ConfigError` where there is none that can be written.
    """
    directory = cache_directory() / "xla"
    configured = jax.config.values["jax_compilation_cache_dir"]
    if configured is not None:
        return directory if configured == str(directory) else None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = partial_name(directory)
        probe.write_bytes(b"")
        probe.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{directory}: cannot write the compilation cache ({reason}); set {VARIABLE} to a writable directory"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    return directory
