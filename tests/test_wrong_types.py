"""Options of wrong types and beyond their ranges are one line that names them, before anything is loaded."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import seqmoe_jax as sm
from seqmoe_jax.errors import SeqMoEError
from seqmoe_jax.options import EngineOptions, GenerateOptions, SamplingConfig

HUGE = 10**400
WHOLE = ["3", None, True, 1.5, float("nan"), 2**40, HUGE, -1, [3], np.zeros(2)]
NUMBERS = ["0.5", True, float("nan"), float("inf"), HUGE, -1, [0.5], object()]
WRONG = {
    "max_new_tokens": (GenerateOptions, [*WHOLE, 0]),
    "stop": (GenerateOptions, ["text", [""], [3], 3, b"x", None]),
    "sampling": (GenerateOptions, ["warm", 3, ["greedy"], None]),
    "chat_options": (GenerateOptions, [["a"], "a", 3]),
    "temperature": (SamplingConfig, [*NUMBERS, None]),
    "top_k": (SamplingConfig, WHOLE),
    "top_p": (SamplingConfig, [*NUMBERS, 0, 1.5]),
    "min_p": (SamplingConfig, [*NUMBERS, 1.0]),
    "seed": (SamplingConfig, [-1, 2**32, "7", None, HUGE]),
    "residency": (EngineOptions, [*NUMBERS, 0, 1.01, "most"]),
    "memory size": (EngineOptions, ["12", "lots", -1, True, 1.5, HUGE, "1e400", "-1GB", "0", ["12GiB"]]),
    "policy": (EngineOptions, ["best", None, 3, ["lru"]]),
    "predictor": (EngineOptions, [None, 3, "", ["auto"]]),
    "transfer engine": (EngineOptions, ["fast", None, 3]),
    "max_batch": (EngineOptions, [*WHOLE, 0, 9]),
    "context": (EngineOptions, ["4096", True, 0, -1, 1.5, 10**30, HUGE]),
    "dtype": (EngineOptions, ["float64", 3, np.float32]),
    "kernels": (EngineOptions, ["cuda", 3]),
    "scheduler": (EngineOptions, ["fifo", None]),
    "tasks": (EngineOptions, ["1", 0, -1, True, 10**30]),
    "threshold": (EngineOptions, [*NUMBERS, 2]),
    "refine": (EngineOptions, ["yes", 1, None]),
    "decode_kernels": (EngineOptions, ["yes", 1, None]),
}
FIELDS = {"memory size": "device_memory", "transfer engine": "transfers"}


PROMPTS = [3, 1.5, None, b"x", [3.5], [-1], [1, "a"], [None], ["a", 3], [], {"a": 1}, object(), [["a"]]]
MODELS = [None, 3, b"demo", "", "\0", "x" * 5000, ["demo"]]


def not_one_line() -> list[str]:
    """What is accepted, or refused otherwise than in one short line that names it."""
    calls = [
        (name, partial(options, **{FIELDS.get(name, name): value}))
        for name, (options, values) in WRONG.items()
        for value in values
    ]
    calls += [("", partial(sm.generate, "demo", prompt, max_new_tokens=2)) for prompt in PROMPTS]
    calls += [("", partial(sm.load, model)) for model in MODELS]
    found = []
    for name, call in calls:
        try:
            call()
            found.append(f"accepted: {call}")
        except SeqMoEError as error:
            if name not in str(error) or "\n" in str(error) or len(str(error)) > 400:
                found.append(f"{call}: {error}")
        except Exception as error:
            found.append(f"{call}: {type(error).__name__}: {error}")
    return found


def test_wrong_types_and_values_are_one_line_that_names_them():
    """In a process of its own, in which nothing but the package itself checks types."""
    code = "import test_wrong_types as t; print('\\n'.join(x[:300] for x in t.not_one_line()))"
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == ""


def test_numbers_of_numpy_are_numbers():
    EngineOptions(residency=np.float64(0.5))


def test_a_memory_size_without_its_unit_says_so():
    with pytest.raises(SeqMoEError, match="write the unit, like 12GiB"):
        EngineOptions(device_memory="12")


def test_a_mistyped_path_does_not_ask_the_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)  # calling it is a TypeError
    for name in ("models/qwen", "./qwen", "/no/such/model", "~/no/such", "models/a/b"):
        with pytest.raises(SeqMoEError, match="no such directory"):
            sm.load(name)
