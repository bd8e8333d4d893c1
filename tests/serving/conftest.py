"""A tiny engine behind a real socket."""

import logging
import threading
from contextlib import contextmanager

import pytest

from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.serving.limits import Limits
from seqmoe_jax.serving.listener import Server, bind
from seqmoe_jax.serving.server import Service
from seqmoe_jax.testing import tiny_engine
from seqmoe_jax.text import Chat


@pytest.fixture(scope="session")
def engine():
    engine = tiny_engine(residency=0.5, max_batch=2)
    engine.chat = Chat(render=lambda messages: "".join(message["content"] + "\n" for message in messages))
    return engine


@contextmanager
def running(service):
    """The port of a server of this service."""
    server = Server(service)
    with bind("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs=dict(sockets=[listening]))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.stop()
            thread.join(20.0)
            assert not thread.is_alive()
            assert service.scheduler.join(20.0)


@pytest.fixture(scope="module")
def serve(engine):
    """Starts servers of the engine; each is a context that gives its port."""

    def start(**options):
        return running(Service(engine, name="tiny", sampling=SamplingConfig(), **options))

    return start


@pytest.fixture(scope="module")
def service(engine):
    return Service(engine, name="tiny", sampling=SamplingConfig(), limits=Limits(pause=2.0, linger=5.0))


@pytest.fixture(scope="module")
def port(service):
    with running(service) as port:
        yield port


@pytest.fixture
def faults():
    """What the server logs as an error."""
    records = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: records.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio", "seqmoe_jax")]
    for logger in loggers:
        logger.addHandler(handler)
    yield records
    for logger in loggers:
        logger.removeHandler(handler)
