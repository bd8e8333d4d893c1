"""What a server has done, in Prometheus's form, for `/metrics`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import jax
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from seqmoe_jax.api import Engine
from seqmoe_jax.generation import Piece
from seqmoe_jax.serving.scheduler import RequestScheduler
from seqmoe_jax.stats import Stats

_COMPILED = "/jax/core/compile/backend_compile_duration"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)  # seconds
_NEXT = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_SUMMED = {
    "experts_routed": "Distinct experts that layers asked for.",
    "experts_loaded": "Experts loaded on demand: neither resident nor on their way.",
    "experts_prefetched": "Experts that landed ahead of their use.",
    "bytes_moved": "Bytes of experts moved to the device.",
}


class Compilations:
    """How many programs this process has compiled or read from the compilation cache, and for how long, from now on."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def close(self) -> None:
        """Counts no more."""
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED:
            with self._lock:
                self.count += 1
                self.seconds += duration_secs


class Metrics:
    """The metrics of one server. `page` is what Prometheus reads."""

    def __init__(self, engine: Engine, scheduler: RequestScheduler):
        self._registry = CollectorRegistry()
        self._prompt = Counter("seqmoe_prompt_tokens", "Tokens of prompts.", registry=self._registry)
        self._new = Counter("seqmoe_generation_tokens", "Tokens generated.", registry=self._registry)
        self._ended = Counter(
            "seqmoe_answers", "Answers that have ended, by why.", ["finish_reason"], registry=self._registry
        )
        self._first = Histogram(
            "seqmoe_time_to_first_token_seconds", "From a request's arrival to its first token.", buckets=_FIRST,
            registry=self._registry,
        )  # fmt: skip
        self._next = Histogram(
            "seqmoe_time_between_tokens_seconds", "From a token of an answer to the next.", buckets=_NEXT,
            registry=self._registry,
        )  # fmt: skip
        self._engine = _EngineMetrics(engine, scheduler)
        self._registry.register(self._engine)

    def close(self) -> None:
        self._engine.compilations.close()

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def meter(self, arrival: float, prompt_tokens: int) -> Meter:
        """Measures one request, which came at a time of `time.monotonic`."""
        self._prompt.inc(prompt_tokens)
        return Meter(self, arrival)


class Meter:
    """Measures one request as its pieces arrive."""

    def __init__(self, metrics: Metrics, arrival: float):
        self._metrics, self._arrival = metrics, arrival
        self._last: dict[int, float] = {}

    def piece(self, index: int, piece: Piece) -> None:
        """A piece of the answer to the prompt `index`."""
        metrics, now = self._metrics, time.monotonic()
        metrics._engine.follow()
        metrics._new.inc()
        last = self._last.get(index)
        (metrics._first if last is None else metrics._next).observe(now - (self._arrival if last is None else last))
        self._last[index] = now
        if piece.finish_reason is not None:
            metrics._ended.labels(piece.finish_reason).inc()


class _EngineMetrics(Collector):
    """What the engine and its queue say when they are asked."""

    def __init__(self, engine: Engine, scheduler: RequestScheduler):
        self.compilations = Compilations()
        self._engine, self._scheduler = engine, scheduler
        self._now: Stats = engine.stats  # of the generation that runs, or ran last
        self._before = {name: -getattr(self._now, name) for name in _SUMMED}  # what ran before is not the server's

    def follow(self) -> None:
        """Sums up the last generation where another one has begun."""
        if (now := self._engine.stats) is not self._now:
            self._before = {name: self._sum(name) for name in _SUMMED}
            self._now = now

    def _sum(self, name: str) -> int:
        return self._before[name] + int(getattr(self._now, name))

    def collect(self) -> Iterator[Metric]:
        self.follow()
        load = self._scheduler.load()
        yield GaugeMetricFamily("seqmoe_prompts_running", "Prompts being answered.", load["running"])
        yield GaugeMetricFamily("seqmoe_prompts_waiting", "Prompts in the queue.", load["waiting"])
        rate = "Of the last generation: experts found resident, of those that its decode steps asked for."
        yield GaugeMetricFamily("seqmoe_expert_hit_rate", rate, self._now.hit_rate)
        for name, says in _SUMMED.items():
            yield CounterMetricFamily(f"seqmoe_{name}", says, self._sum(name))
        yield CounterMetricFamily(
            "seqmoe_compilations", "Programs compiled, or read from the cache.", self.compilations.count
        )
        seconds = "Seconds that these took."
        yield CounterMetricFamily("seqmoe_compilation_seconds", seconds, self.compilations.seconds)
