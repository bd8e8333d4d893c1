"""A profile of decode steps on the device, read back as launches."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax

from seqmoe_jax.bench.shares import Launch, shares_of
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import ProfileError
from seqmoe_jax.options import SamplingConfig


def profile_steps(
    engine: TokenEngine,
    prompts: Sequence[Sequence[int]],
    *,
    new: int,
    steps: int,
    sampling: SamplingConfig | None = None,
) -> dict[str, Any]:
    """`shares_of` about the last `steps` decode steps, or a few less, of a generation of `new` tokens.

    Raises `ProfileError` where the backend has no profile of its device.
    """
    events = engine.run(prompts, max_new_tokens=new, sampling=sampling)
    with tempfile.TemporaryDirectory(prefix="seqmoe-profile-") as directory:
        quiet = jax.profiler.ProfileOptions()
        quiet.python_tracer_level, quiet.host_tracer_level = 0, 1
        list(islice(events, (new - min(steps, new - 1)) * len(prompts)))
        before = engine.steps_run()
        with jax.profiler.trace(directory, profiler_options=quiet):
            list(events)
            count = engine.steps_run() - before
        launches, beside = read_profile(Path(directory), "jit_step", scopes_of(engine.step_program().as_text() or ""))
    return shares_of(launches, count, engine=engine.transfers_name != "none") | {"copies_beside_us": beside / count}


def scopes_of(program: str) -> dict[str, str]:
    """The path of named scopes of every instruction of an optimised program, from its text."""
    found = re.findall(r'^\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{[^}]*?op_name="([^"]*)"', program, re.MULTILINE)
    return {kernel_of(name): scope for name, scope in found}


def kernel_of(instruction: str) -> str:
    """What XLA calls the kernel of an instruction, which may be all that a launch says of itself."""
    return re.sub(r"\W", "_", instruction)


def read_profile(directory: Path, module: str, scopes: Mapping[str, str]) -> tuple[list[Launch], float]:
    """The launches of one module on the first device, and the microseconds of all copies that belong to no module.

    `scopes` are those of its instructions; what a launch says of itself is used for others.
    """
    files = sorted(directory.rglob("*.xplane.pb"))
    if not files:
        raise ProfileError("the profiler wrote no profile")
    launches, unnamed = list[Launch](), list[Launch]()
    beside, planes = 0.0, []
    for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes:
        planes.append(plane.name)
        if not re.match(r"/device:(GPU|TPU):0", plane.name):
            continue
        for line in plane.lines:
            if not re.match(r"Stream #|XLA Ops", line.name):
                continue
            for event in line.events:
                stats = dict(event.stats)
                copy = event.name.lower().startswith("memcpy")
                said = next((str(stats[name]) for name in ("name", "tf_op") if "/" in str(stats.get(name, ""))), "")
                launch = Launch(
                    name=event.name,
                    scope=scopes.get(kernel_of(str(stats.get("hlo_op", ""))), scopes.get(event.name, said)),
                    start=event.start_ns / 1e3,
                    duration=event.duration_ns / 1e3,
                )
                if str(stats.get("hlo_module", "")).startswith(module):
                    launches.append(launch)
                elif "hlo_module" not in stats and copy:
                    beside += launch.duration
                elif "hlo_module" not in stats:
                    unnamed.append(launch)
    launches = launches or unnamed  # should events not say their module: nothing else ran while it was profiled
    if not launches:
        raise ProfileError(f"no launches of {module} on a device in the profile; its planes: {', '.join(planes)}")
    return launches, beside
