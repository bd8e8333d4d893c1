"""Which experts a `quantization_config` leaves as they are: what planning knows of them before the files are opened."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import replace
from fnmatch import fnmatchcase

from pallas_kernels.layout import FP8
from seqmoe_jax.models.naming import ExpertNames
from seqmoe_jax.models.spec import ModelSpec

# Regular expressions in which nothing is special but ".*" and the ends. What others mean, the files tell.
SIMPLE = re.compile(r"\^?(?:[\w-]|\\?\.|\.\*)*\$?")


def with_unquantised(spec: ModelSpec, names: ExpertNames) -> ModelSpec:
    """The spec with a dtype that holds all experts: where some are not FP8, that of those, beside FP8's scales."""
    if spec.quantization is None or not spec.quantization.plain:
        return spec
    plain = spec.quantization.plain
    spec = replace(spec, quantization=replace(spec.quantization, plain=()))
    if spec.expert_dtype != FP8 or True not in (left := set(_left(spec, names, plain))):
        return spec
    return replace(spec, expert_dtype=spec.dtype, expert_scales=spec.expert_scales if False in left else None)


def _left(spec: ModelSpec, names: ExpertNames, plain: tuple[str, ...]) -> Iterator[bool]:
    """Whether an expert's matrix is left as it is: of every expert, or where no single ones are named, of one."""
    patterns = {_glob(pattern) for pattern in plain}
    globs = {pattern for pattern in patterns if "*" in pattern}
    literal = patterns - globs
    single = globs or any(re.search(r"experts\.\d", pattern) for pattern in literal)
    for index in spec.moe_layers:
        for expert in range(spec.moe.num_experts if single else 1):
            for theirs in (names.gate, names.up, names.down):
                module = f"layers.{index}." + theirs.format(expert=expert).removesuffix(".weight")
                yield not literal.isdisjoint(_runs(module)) or any(fnmatchcase(module, glob) for glob in globs)


def _glob(pattern: str) -> str:
    """A name or pattern of modules from the layers on, below whatever root; "" for one that is too much for a glob."""
    if pattern.startswith("re:"):
        expression = pattern.removeprefix("re:")
        if not SIMPLE.fullmatch(expression):
            return ""
        end = "" if expression.endswith("$") else "*"
        pattern = expression.strip("^$").replace("\\.", ".").replace(".*", "*") + end
    return pattern[pattern.index("layers.") :] if "layers." in pattern else pattern


def _runs(module: str) -> Set[str]:
    """A list names a module, one that it is in, or how the name of either ends: any run of the parts of its name."""
    parts = module.split(".")
    return {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
