"""The engine: a model in memory, and the loop that runs ahead of the device while tokens come back.

All device state lives here; the programs are pure and live in `decode` and `prefill`.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial

import jax
import numpy as np
from jaxtyping import Float32

from pallas_kernels.backend import resolve
from seqmoe_jax.decode.policy import decode_policy
from seqmoe_jax.decode.replay import Replay
from seqmoe_jax.decode.step import StepConfig
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.experts.cache import CacheConfig
from seqmoe_jax.experts.policy import rule_of
from seqmoe_jax.forecast.trained import TrainedPredictor
from seqmoe_jax.lanes import Lanes, TokenEvent, TokenRequest
from seqmoe_jax.memory.plan import DEFAULT_CONTEXT, MemoryPlan, least_slots, plan_memory
from seqmoe_jax.models.fused import DecodeKernels, unfit
from seqmoe_jax.models.model import Model
from seqmoe_jax.models.weights import ModelWeights
from seqmoe_jax.offloading import Offloading
from seqmoe_jax.options import EngineOptions, SamplingConfig, check_policy, parse_bytes
from seqmoe_jax.prefetch.engine import TransferEngine
from seqmoe_jax.prefetch.factory import make_transfers
from seqmoe_jax.prefill.lengths import capacity_of
from seqmoe_jax.prefill.reader import PromptReader, SequenceRouting
from seqmoe_jax.programs import Programs
from seqmoe_jax.prompts import check_prompts
from seqmoe_jax.stats import Stats
from seqmoe_jax.turns import Turns
from seqmoe_jax.warm_up import warm_up

log = logging.getLogger("seqmoe_jax")

COUNTED = 64  # tokens between two updates of the statistics of a generation that goes on


class TokenEngine:
    """Generates token ids. One generation at a time: another thread's waits, one begun inside it is refused.

    Residency and policy are fixed when the engine is made; the cache stays warm from one generation to the next.
    What it holds is given back by `close`, or when nobody refers to it any more.
    Text, prompts and stop strings are the business of `api`.
    """

    def __init__(
        self,
        model: Model,
        options: EngineOptions = EngineOptions(),  # noqa: B008  frozen
        *,
        predictor: TrainedPredictor | None = None,
        vocab: int | None = None,
        replay: Replay | None = None,
        announce: Callable[[str], None] | None = None,
    ):
        """Of `options`, those about files (`predictor`, `dtype`) were followed when `model` was loaded.

        `predictor` is what policy seqmoe forecasts by, and what makes prefetching possible.
        `vocab`: the tokenizer's; ids beyond it are never generated. Default: every row of the output head may be.
        `replay` forces recorded routing on the model. `announce` is told what is being compiled.
        Raises `ResidencyError` or `ConfigError` where that cannot work.
        """
        self._model: Model | None = model
        self.options, self.policy = options, check_policy(options.policy)
        self.programs = Programs(announce)
        spec, max_batch, kernels = model.spec, options.max_batch, resolve(options.kernels)
        self.context = min(options.context or DEFAULT_CONTEXT, spec.context)
        self.dtype = model.weights.embed.dtype
        self.device = next(iter(model.weights.embed.devices()))
        self.plan: MemoryPlan = plan_memory(
            spec,
            residency=options.residency,
            device_memory=None if options.device_memory is None else parse_bytes(options.device_memory),
            available=_available_memory(self.device, model.weights),
            batch=max_batch,
            context=self.context,
            activation_dtype=self.dtype,
            forecast=0 if predictor is None else predictor.nbytes,
        )
        self.max_batch, self.vocab = max_batch, min(vocab or spec.vocab, spec.vocab)
        everything = self.plan.slots == spec.num_keys
        self.config = CacheConfig(
            layout=spec.expert_layout,
            layers=len(spec.moe_layers),
            experts=spec.moe.num_experts,
            slots=self.plan.slots,
            rule=rule_of(self.policy),
            managed=not (everything and self.policy == "full"),
            implementation=kernels,
        )
        self.kernels = DecodeKernels.of(kernels if options.decode_kernels else "xla")
        if predictor is not None:
            moe = spec.moe
            predictor.config.check(layers=len(spec.moe_layers), experts=moe.num_experts, active=moe.top_k)
        self.predictor = predictor if self.policy == "seqmoe" and not everything else None
        self.replay = replay
        self._plan_config, transfers = make_transfers(
            options, model.pools, self.device, self.config, predicted=self.predictor is not None,
            needed=spec.moe.top_k * max_batch,
        )  # fmt: skip
        if self._plan_config is not None:
            self.config = replace(self.config, tasks=self._plan_config.tasks)
        self.decode_policy = decode_policy(
            self.policy,
            self.config,
            None if self.predictor is None else self.predictor.config,
            refine=options.refine,
            plan=self._plan_config,
            ahead=1 if transfers is None else transfers.ahead,
        )
        self._reader = PromptReader(
            model, self.config, self.programs, policy=self.policy, capacity=capacity_of([self.context], [0]),
            pass_chunks=self.plan.pass_chunks, predictor=self.predictor, replay=replay, device=self.device,
        )  # fmt: skip
        self._turns = Turns()
        self._offloading: Offloading | None = Offloading(
            model,
            self.config,
            policy=self.policy,
            reserve=least_slots(spec, max_batch),
            device=self.device,
            transfers=transfers,
        )
        if transfers is not None:
            # Of an engine that nobody closes. At the end of the process `_leave` sees to it, in order.
            weakref.finalize(self, transfers.close).atexit = False
        _alive.add(self)
        self.last_stats = Stats()
        log.info("%s: policy %s, forecast %s, transfers %s, %d of %d experts have a slot, kernels %s; %s", model.name,
                 self.policy, self.forecast_name, self.transfers_name, self.plan.slots, spec.num_keys,
                 self.config.implementation, self.plan.describe())  # fmt: skip
        for reason in unfit(spec, self.kernels):
            log.info("%s: plain XLA for %s", model.name, reason)

    @property
    def model(self) -> Model:
        """Raises `EngineError` after `close`."""
        if self._model is None:
            self._turns.check_open()
        assert self._model is not None
        return self._model

    @property
    def closed(self) -> bool:
        return self._turns.closed

    def check_open(self) -> None:
        """Raises `EngineError` after `close`."""
        self._turns.check_open()

    @property
    def forecast_name(self) -> str:
        if self.policy != "seqmoe":
            return "none"
        return "history" if self.predictor is None else self.predictor.name

    @property
    def transfers_name(self) -> str:
        return "none" if self.transfers is None else self.transfers.name

    @property
    def offloading(self) -> Offloading:
        """Raises `EngineError` after `close`."""
        if self._offloading is None:
            self._turns.check_open()
        assert self._offloading is not None
        return self._offloading

    @property
    def transfers(self) -> TransferEngine | None:
        """What prefetches; None where nothing does, and after `close`."""
        return None if self._offloading is None else self._offloading.transfers

    def steps_run(self) -> int:
        """Decode steps since the engine was made; waits for those dispatched."""
        self.check_open()
        return int(self.offloading.state.steps)

    def step_program(self) -> jax.stages.Compiled:
        """The decode step compiled last. Raises `ConfigError` before the first generation."""
        self.check_open()
        programs = self.programs.named("step")
        if not programs:
            raise ConfigError("no decode step has been compiled yet; generate something first")
        return programs[-1]

    def close(self, *, leaving: bool = False) -> None:
        """Gives back device memory, programs and the engine's thread; its share of the model too.

        A generation that is open, in whatever thread, ends with an `EngineError` at its next token, and so does every
        later call. Closing twice is closing once. `leaving`: see `Turns.close`.
        """
        if self._turns.close(leaving=leaving):
            self._release()

    def _release(self) -> None:
        offloading, self._offloading = self._offloading, None
        self._model = self.predictor = self.replay = None
        vars(self).pop("_reader", None)
        if offloading is not None:
            offloading.close()
        self.programs.close()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> Generator[TokenEvent, None, None]:
        """Token ids in, one event per new token, in the order of steps. `last_stats` is complete when it is exhausted.

        It begins when its first event is asked for: then another thread's generation is waited for.

        `max_new_tokens` and `sampling` hold for all prompts or are one for each; of a single `sampling`, prompt b
        draws with seed + b.
        Closing the iterator ends the generation; steps already dispatched still run.
        Raises `PromptError` for an empty prompt, one longer than the context, or more than `max_batch`; `EngineError`
        after `close`, or inside another generation that the caller reads.
        """
        self.check_open()
        count = len(prompts)
        lengths = [max_new_tokens] * count if isinstance(max_new_tokens, int) else list(max_new_tokens)
        if sampling is None or isinstance(sampling, SamplingConfig):
            sampling = (sampling or SamplingConfig()).spread(count)
        self.check(prompts, lengths)
        session = self.session()
        for prompt, more, how in zip(prompts, lengths, sampling, strict=True):
            session.add(
                TokenRequest(prompt=prompt, max_new_tokens=more, sampling=how, eos_token_ids=tuple(eos_token_ids))
            )
        return session.events

    def session(self, poll: Callable[[], None] | None = None) -> Session:
        """Sequences that join and leave while others are generated. Raises `EngineError` after `close`.

        `poll` is called often while its events are asked for, by whoever asks: there it may add and drop sequences.
        """
        self.check_open()
        lanes = self._lanes(poll)
        return Session(self, lanes, self._turns.run(partial(self._events, lanes)))

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles whatever requests can need, so that none of them waits for it. `progress` is told how many of how
        many programs there are."""
        self.check_open()

        def prepare() -> Generator[None, None, None]:
            warm_up(self._lanes(None), progress)
            yield

        next(self._turns.run(prepare))

    def routing(self, sequences: Sequence[Sequence[int]]) -> list[SequenceRouting]:
        """Experts and their weights that every token of each sequence is routed to, as decoding them would route.

        Tokens go through prefill, many at a time. Raises `PromptError` as `run` does for prompts.
        """
        self.check_open()
        self.check(sequences, [1] * len(sequences))

        def read() -> Generator[list[SequenceRouting], None, None]:
            self.offloading.begin_prompts()
            yield self._reader.routing(sequences, self.offloading)

        return next(self._turns.run(read))

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Float32[np.ndarray, "T V"]]:
        """Logits after every token of each sequence. Raises `PromptError` as `run` does for prompts."""
        self.check_open()
        self.check(sequences, [1] * len(sequences))

        def read() -> Generator[list[np.ndarray], None, None]:
            self.offloading.begin_prompts()
            yield self._reader.logits(sequences, self.offloading)

        return next(self._turns.run(read))

    def refill(self, write: Callable[[Model], Model]) -> None:
        """Other weights of the same shapes, without a new program. While nothing runs or moves, `write` fills the pools
        and returns the model with its new dense weights; then every slot is empty."""
        self.check_open()

        def fill() -> Generator[None, None, None]:
            self.offloading.begin_prompts()
            jax.block_until_ready(self.offloading.state)
            self._model = self._reader.model = model = write(self.model)
            self.offloading.fill(model)
            yield

        next(self._turns.run(fill))

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> None:
        """Raises what `run` would for these prompts and lengths."""
        check_prompts(
            prompts, max_new_tokens, self.model.spec, slots=self.plan.slots, context=self.context,
            max_batch=self.max_batch,
        )  # fmt: skip

    def _lanes(self, poll: Callable[[], None] | None) -> Lanes:
        # As many sequences as there are slots for all that they may route to at once.
        spec, slots = self.model.spec, self.plan.slots
        most = max(count for count in range(1, self.max_batch + 1) if count == 1 or least_slots(spec, count) <= slots)
        return Lanes(
            offloading=self.offloading, reader=self._reader, programs=self.programs,
            step_configs={greedy: self._step_config(greedy) for greedy in (True, False)}, most=most,
            poll=poll,
        )  # fmt: skip

    def _step_config(self, greedy: bool) -> StepConfig:
        return StepConfig(
            spec=self.model.spec,
            cache=self.config,
            policy=self.decode_policy,
            greedy=greedy,
            vocab=self.vocab,
            kernels=self.kernels,
            channel=None if self.transfers is None else self.transfers.channel,
        )

    def _events(self, lanes: Lanes) -> Generator[TokenEvent, None, None]:
        """What the lanes give when their turn has come; keeps `last_stats`."""
        offloading, started, compiled_before = self.offloading, time.perf_counter(), self.programs.compile_s
        transferred_before = offloading.transferred()
        stats = self.last_stats = self._new_stats(lanes.prompt_tokens)
        decoding_since = started

        def count() -> None:
            stats.prompt_tokens, stats.compile_s = lanes.prompt_tokens, self.programs.compile_s - compiled_before
            moved = offloading.transferred().since(transferred_before)
            stats.count(lanes.prefill, lanes.decode, moved, self.config.layout.block_bytes)

        try:
            for event in lanes.events():
                stats.new_tokens += 1
                if stats.new_tokens == 1:
                    stats.ttft_s = time.perf_counter() - started - (self.programs.compile_s - compiled_before)
                if stats.new_tokens % COUNTED == 0:
                    count()
                yield event
                decoded = stats.new_tokens - lanes.begun
                if decoded == 0:
                    decoding_since = time.perf_counter()
                else:
                    stats.tokens_per_second = decoded / (time.perf_counter() - decoding_since)
        finally:
            count()
            if self._turns.closed:  # from inside this generation
                self._release()

    def _new_stats(self, prompt_tokens: int) -> Stats:
        return Stats(
            prompt_tokens=prompt_tokens,
            residency=self.plan.residency,
            slots=self.plan.slots,
            policy=self.policy,
            forecast=self.forecast_name,
            transfers=self.transfers_name,
            backend=jax.default_backend(),
            kernels=self.config.implementation,
        )


class Session:
    """Sequences that are generated together, see `TokenEngine.session`. `events` gives their tokens until none is left;
    closing it ends them all."""

    def __init__(self, engine: TokenEngine, lanes: Lanes, events: Generator[TokenEvent, None, None]):
        self._engine, self._lanes, self.events = engine, lanes, events

    @property
    def free(self) -> int:
        """Sequences that may be added without one of them having to wait for another to end."""
        return self._lanes.free

    def add(self, request: TokenRequest) -> int:
        """Returns the number that its events have: 0, 1, ... Raises `PromptError` for what the engine cannot run."""
        self._engine.check([request.prompt], [request.max_new_tokens])
        return self._lanes.add(request)

    def drop(self, number: int) -> None:
        """Nobody wants this sequence any more."""
        self._lanes.drop(number)


_alive: weakref.WeakSet[TokenEngine] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Ends what runs before Python and JAX take themselves apart: threads that were in the middle would crash."""
    try:
        for engine in list(_alive):
            engine.close(leaving=True)
    except KeyboardInterrupt:  # whoever asks again wants out
        os._exit(130)


def _available_memory(device: jax.Device, weights: ModelWeights) -> int | None:
    """Bytes this process may use on the device, weights already there included; None where the backend does not say."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    loaded = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    return stats["bytes_limit"] - stats["bytes_in_use"] + loaded
