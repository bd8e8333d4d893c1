"""An engine under a user's hands: one generation at a time, an orderly end, and nothing left behind."""

import asyncio
import contextvars
import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import jax
import pytest

import seqmoe_jax as sm
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import EngineError, PromptError
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.testing import tiny_engine, tiny_model, untrained_predictor

LONG = 200


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(residency=0.5, max_batch=2)


@pytest.fixture(scope="module")
def expected(engine):
    return engine.generate("Once", max_new_tokens=20).tokens


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("seqmoe")}


def in_thread(work):
    """Runs `work` in a thread; its result or error when called."""
    results = []

    def run():
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(60)
        assert results, "the thread hangs"
        return results[0]

    return result


def test_a_generation_inside_an_open_stream_is_refused(engine, expected):
    stream = engine.stream("Once", max_new_tokens=20)
    first = next(stream)
    for begin in (
        lambda: engine.generate("x"),
        lambda: next(engine.stream("x")),
        lambda: engine.token_engine.routing([[1, 2]]),
    ):
        with pytest.raises(EngineError, match="open in this thread"):
            begin()
    assert first + "".join(stream) == engine.generate("Once", max_new_tokens=20).text
    assert engine.generate("Once", max_new_tokens=20).tokens == expected


def test_another_thread_waits_for_its_turn(engine, expected):
    stream = engine.stream("Once", max_new_tokens=20)
    next(stream)
    other = in_thread(lambda: engine.generate("Once", max_new_tokens=20).tokens)
    for _ in stream:
        time.sleep(0.01)
    assert other() == expected


def test_threads_of_a_pool_may_share_streams(engine, expected):
    """As web frameworks read them: every token in whatever thread is free, so that the thread that waits for the
    stream's end may be the one that read its last token."""

    async def serve():
        stream = engine.stream("Once", max_new_tokens=20)
        await asyncio.to_thread(next, stream)
        other = asyncio.get_running_loop().create_task(
            asyncio.to_thread(engine.generate, "Once", max_new_tokens=20), context=fresh
        )
        await asyncio.sleep(0.05)
        await asyncio.to_thread(list, stream)
        return (await other).tokens

    fresh = contextvars.Context()
    assert asyncio.run(serve()) == expected


def test_a_generation_that_would_stop_the_event_loop_is_refused(engine):
    async def one():
        stream = engine.stream("Once", max_new_tokens=20)
        next(stream)
        await asyncio.sleep(0)
        stream.close()

    async def other():
        with pytest.raises(EngineError, match="open in this thread"):
            engine.generate("x")

    async def both():
        await asyncio.gather(one(), other())

    asyncio.run(both())


def test_a_stream_that_is_dropped_leaves_the_engine_free(engine, expected):
    next(engine.stream("Once", max_new_tokens=LONG))  # dropped at once
    assert engine.generate("Once", max_new_tokens=20).tokens == expected
    circle = [engine.stream("Once", max_new_tokens=LONG)]
    next(circle[0])
    circle.append(circle)
    gc.disable()
    try:
        del circle
        assert engine.generate("Once", max_new_tokens=20).tokens == expected
    finally:
        gc.enable()


def test_more_prompts_than_the_engine_was_loaded_for_are_refused(engine):
    with pytest.raises(PromptError, match=r"3 prompts at once.* max_batch=2; give at most 2 at a time .*max_batch=3"):
        engine.generate(["a", "b", "c"])
    with pytest.raises(PromptError, match=r"9 prompts at once.*8 is the most"):
        engine.token_engine.routing([[1]] * 9)
    with pytest.raises(PromptError, match="at least one prompt"):
        engine.generate([])


def test_after_close_every_call_says_so():
    with tiny_engine(residency=0.5) as engine:
        stream = engine.stream("Once", max_new_tokens=LONG)
        unbegun = engine.stream("Once", max_new_tokens=LONG)
        next(stream)
    engine.close()
    for call in (
        lambda: engine.generate("x"),
        lambda: engine.stream("x"),
        lambda: engine.request("x"),
        lambda: engine.run([]),
        lambda: next(stream),
        lambda: next(unbegun),
        lambda: engine.token_engine.run([[1]], max_new_tokens=1),
        lambda: engine.token_engine.routing([[1]]),
        lambda: engine.token_engine.check([[1]], [1]),
        lambda: engine.token_engine.step_program(),
        lambda: engine.token_engine.steps_run(),
        lambda: engine.token_engine.model,
        lambda: engine.__enter__(),
    ):
        with pytest.raises(EngineError, match="has been closed"):
            call()
    assert engine.stats.new_tokens >= 1  # what was done stays known


def test_closing_ends_another_threads_generation():
    model = tiny_model()
    engine = TokenEngine(
        model, EngineOptions(residency=0.7, transfers="callback", threshold=0.01), predictor=untrained_predictor(model)
    )
    begun = threading.Event()

    def read():
        for _ in engine.run([[1, 2, 3]], max_new_tokens=500):
            begun.set()

    result = in_thread(read)
    assert begun.wait(60)
    engine.close()
    assert isinstance(result(), EngineError)


def test_closing_from_inside_a_generation_ends_it():
    engine = tiny_engine(residency=0.5)
    token_engine = engine.token_engine
    hold = token_engine.offloading.hold
    token_engine.offloading.hold = lambda offload: (hold(offload), engine.close())  # as a handler of a signal would
    with pytest.raises(EngineError, match="has been closed"):
        list(engine.stream("Once", max_new_tokens=5))
    with pytest.raises(EngineError, match="has been closed"):
        token_engine.model  # noqa: B018


def test_an_engine_that_is_dropped_ends_its_thread():
    model, before = tiny_model(), threads()
    engine = TokenEngine(
        model, EngineOptions(residency=0.7, transfers="callback", threshold=0.01), predictor=untrained_predictor(model)
    )
    stream = engine.run([[1, 2, 3]], max_new_tokens=50)
    next(stream)
    assert threads() > before
    alive = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        next(stream)  # whoever reads a stream keeps its engine
        del stream
        assert alive() is None
    finally:
        gc.enable()
    assert threads() == before


def test_generate_closes_what_it_loaded(monkeypatch):
    made = []
    monkeypatch.setattr(sm.api, "load", lambda *_, **options: made.append(tiny_engine(**options)) or made[-1])
    assert len(sm.generate("tiny", ["a", "b", "c"], max_new_tokens=2)) == 3
    with pytest.raises(EngineError, match="closed"):
        made[0].generate("x")


ENGINE = """
from seqmoe_jax.api import Engine
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.testing import tiny_model, untrained_predictor
from seqmoe_jax.text import ByteTokenizer
model = tiny_model()
options = EngineOptions(residency=0.7, transfers="callback", threshold=0.01)
engine = Engine(TokenEngine(model, options, predictor=untrained_predictor(model)), ByteTokenizer(vocab=256))
begun = threading.Event()
def read():
    while True:
        for _ in engine.stream("Once", max_new_tokens=300):
            begun.set()
thread = threading.Thread(target=read, daemon=True)
"""
LEAVING = {
    "a stream that is open and a thread that waits for it": ENGINE + """
stream = engine.stream("Once", max_new_tokens=300)
next(stream)
thread.start()
""",
    "a thread that generates": ENGINE + """
thread.start()
begun.wait()
""",
    "a program that is being compiled": """
from seqmoe_jax.programs import Programs
def slow(x):
    for _ in range(60):
        x = jnp.sort(jnp.sin(x @ x), axis=0)
    return x
programs = Programs()
programs.prepare("slow", "it", jax.jit(slow), jnp.ones((32, 32)))
""",
}  # fmt: skip


@pytest.mark.parametrize("what", LEAVING)
def test_leaving_python_in_the_middle_prints_nothing(what):
    program = f"import threading, jax, jax.numpy as jnp\n{LEAVING[what]}\nprint('leaving')"
    cache = os.environ | {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False, env=cache
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")
