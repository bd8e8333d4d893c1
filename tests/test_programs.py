"""Programs are given back: by an engine that ends, and the least used ones where there are too many."""

import gc
import itertools
import os
from collections import OrderedDict
from contextlib import closing
from pathlib import Path
from random import Random

import jax
import jax.numpy as jnp
import pytest

from seqmoe_jax import programs
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import EngineError
from seqmoe_jax.options import EngineOptions, SamplingConfig
from seqmoe_jax.programs import Programs
from seqmoe_jax.testing import tiny_model, untrained_predictor

MAPPINGS = Path("/proc/self/maps")


@jax.jit
def double(x):
    return jnp.sin(x) * 2


@pytest.fixture
def few(monkeypatch):
    """No more than 3 programs are kept, those of other tests aside."""
    monkeypatch.setattr(programs, "MOST_LIVE", 3)
    monkeypatch.setattr(programs, "_live", OrderedDict())


def get(made, size):
    return made.get(("double", size), "a test", double, jnp.ones(size))


def sizes(made):
    return sorted(program.args_info[0][0].shape[0] for program in made.named("double"))


def test_the_least_recently_used_program_goes_first(few):
    made = Programs()
    for size in (1, 2, 3, 1, 4, 5):
        assert get(made, size)(jnp.ones(size)).shape == (size,)
    assert sizes(made) == [1, 4, 5]
    assert get(made, 2)(jnp.ones(2)).shape == (2,)  # made again


def test_a_program_that_was_promised_stays(few):
    made = Programs()
    get(made, 1)
    for size in (1, 2):
        made.prepare(("double", size), "a test", double, jnp.ones(size), kept=True)
    for size in (3, 4, 5, 6):
        get(made, size)
    assert sizes(made) == [1, 2, 4, 5, 6]


def test_the_bound_is_of_all_engines_together(few):
    first, second = Programs(), Programs()
    for size in (1, 2):
        get(first, size)
    for size in (1, 2):
        get(second, size)
    assert (sizes(first), sizes(second)) == ([2], [1, 2])
    second.close()
    get(first, 1)
    assert sizes(first) == [1, 2]
    with pytest.raises(EngineError, match="given back"):
        get(second, 1)


def test_a_compiler_that_fails_is_asked_again():
    made, trouble = Programs(), [RuntimeError("no memory")]

    @jax.jit
    def fails(x):
        if trouble:
            raise trouble.pop()
        return x

    with pytest.raises(RuntimeError, match="no memory"):
        made.get("fails", "a test", fails, jnp.ones(2))
    assert made.get("fails", "a test", fails, jnp.ones(2))(jnp.ones(2)).shape == (2,)


@pytest.mark.skipif(not MAPPINGS.exists(), reason="mappings are counted by /proc")
@pytest.mark.parametrize("ended", ["closed", "dropped"])
def test_an_engine_that_ends_leaves_no_program_and_takes_none_of_the_users(ended):
    @jax.jit
    def of_the_user(x):
        traced.append(x)
        return x + 1

    traced, model, counts = [], tiny_model(), []
    of_the_user(1)
    for residency in (0.5, 0.6, 0.7):
        engine = TokenEngine(model, EngineOptions(residency=residency))
        list(engine.run([[1, 2, 3]], max_new_tokens=3))
        if ended == "closed":
            engine.close()
        else:
            del engine
        gc.collect()
        counts.append(len(MAPPINGS.read_text().splitlines()))
    assert counts[2] - counts[1] < 20  # an engine's programs have hundreds
    of_the_user(1)
    assert len(traced) == 1


def settings():
    """Settings of engines that differ in what is compiled, or held."""
    choices = itertools.product(
        (1.0, 0.8, 0.6, 0.5), ("seqmoe", "lru", "lfu", "prefill-hot", "full"), ("none", "device_put"), (1, 2),
        (0.0, 0.7), (64, 128, 256),
    )  # fmt: skip
    # In any order but that of the product, whose first ten are all of one residency and policy.
    for residency, policy, transfers, batch, temperature, context in Random(0).sample(list(choices), 480):
        if policy == "seqmoe" or transfers == "none":
            yield (
                EngineOptions(
                    residency=residency, policy=policy, transfers=transfers, max_batch=batch, context=context
                ),
                SamplingConfig(temperature=temperature),
            )


@pytest.mark.slow
@pytest.mark.skipif(not MAPPINGS.exists(), reason="mappings are counted by /proc")
def test_two_hundred_engines_in_one_process_take_no_more_than_ten():
    model = tiny_model(num_hidden_layers=2, mlp_only_layers=[])
    predictor, held = untrained_predictor(model), []
    for number, (options, sampling) in enumerate(settings()):
        if number == 200:
            break
        with closing(TokenEngine(model, options, predictor=predictor)) as engine:
            prompts = [[1, 2, 3], [7] * 20][: options.max_batch]
            list(engine.run(prompts, max_new_tokens=4, sampling=sampling))
        gc.collect()
        programs.trim()  # as the end of the next engine does
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        held.append((len(MAPPINGS.read_text().splitlines()), resident))
    print(held[9], held[99], held[-1])
    assert max(mappings for mappings, _ in held[10:]) < held[9][0] + 400  # one engine's programs have thousands
    assert held[-1][1] < held[9][1] + (150 << 20)
