"""The engine: a model in memory, and the loop that runs ahead of the device while tokens come back.

All device state lives here; the programs are pure and live in `decode` and `prefill`.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from pallas_kernels.backend import resolve
from seqmoe_jax.decode.loop import Lanes, TokenEvent, run_ahead
from seqmoe_jax.decode.policy import decode_policy
from seqmoe_jax.decode.replay import Replay
from seqmoe_jax.decode.state import Offload, Sequences, StepOutput, empty_offload
from seqmoe_jax.decode.step import StepConfig, jitted_step
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.experts.cache import PINNED, CacheConfig, keep, rescore, settled
from seqmoe_jax.experts.policy import rule_of
from seqmoe_jax.forecast.trained import TrainedPredictor
from seqmoe_jax.memory.plan import DEFAULT_CONTEXT, MemoryPlan, least_slots, plan_memory
from seqmoe_jax.models.fused import DecodeKernels, unfit
from seqmoe_jax.models.model import Model
from seqmoe_jax.models.weights import ModelWeights
from seqmoe_jax.options import EngineOptions, SamplingConfig, check_policy, parse_bytes
from seqmoe_jax.prefetch.engine import TransferCounts
from seqmoe_jax.prefetch.factory import make_transfers
from seqmoe_jax.prefill.lengths import capacity_of, lanes_for
from seqmoe_jax.prefill.programs import begin_decoding, first_token
from seqmoe_jax.prefill.reader import PromptReader, SequenceRouting
from seqmoe_jax.programs import Programs, owned, shapes_of
from seqmoe_jax.prompts import check_prompts
from seqmoe_jax.sampling import SamplingParams
from seqmoe_jax.stats import Counts, Stats
from seqmoe_jax.turns import Turns

log = logging.getLogger("seqmoe_jax")

RUN_AHEAD = 4  # steps dispatched before the oldest one's tokens are read; hides the host from the device


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """What the programs of one generation are made for, and given."""

    size: int
    capacity: int
    sampling: SamplingParams
    of_each: Sequence[SamplingParams]  # the same, of each sequence
    eos_token_ids: Int32[Array, " N"]
    config: StepConfig

    @property
    def key(self) -> tuple[Any, ...]:
        """All that the shapes of its programs depend on."""
        return self.size, self.capacity, self.eos_token_ids.shape[0], self.config.greedy


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
        self._plan_config, self.transfers = make_transfers(
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
            ahead=1 if self.transfers is None else self.transfers.ahead,
        )
        self._reader = PromptReader(
            model, self.config, self.programs, policy=self.policy, pass_chunks=self.plan.pass_chunks,
            predictor=self.predictor, replay=replay, device=self.device,
        )  # fmt: skip
        self._turns = Turns()
        if self.transfers is not None:
            # Of an engine that nobody closes. At the end of the process `_leave` sees to it, in order.
            weakref.finalize(self, self.transfers.close).atexit = False
        _alive.add(self)
        self.last_stats = Stats()
        self._offload = self._new_offload()
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

    def steps_run(self) -> int:
        """Decode steps since the engine was made; waits for those dispatched."""
        self.check_open()
        return int(self._offload.steps)

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
        transfers, self.transfers, self._model, self.predictor, self.replay = self.transfers, None, None, None, None
        held = vars(self).pop("_offload", None), vars(self).pop("_reader", None)
        if transfers is not None:
            with suppress(RuntimeError):  # steps under way read what it writes; some may have failed
                jax.block_until_ready(held[0])
            transfers.close()
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
        draws with seed + b. Greedy and drawn sequences cannot be mixed.
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
        return self._turns.run(partial(self._events, prompts, lengths, sampling, eos_token_ids))

    def routing(self, sequences: Sequence[Sequence[int]]) -> list[SequenceRouting]:
        """Experts and their weights that every token of each sequence is routed to, as decoding them would route.

        Tokens go through prefill, many at a time. Raises `PromptError` as `run` does for prompts.
        """
        self.check_open()
        just_one = [1] * len(sequences)
        self.check(sequences, just_one)
        capacity = capacity_of([*map(len, sequences)], just_one)

        def read() -> Generator[list[SequenceRouting], None, None]:
            self._begin()
            yield self._reader.routing(sequences, capacity=capacity, offload=self._offload, hold=self._hold)

        return next(self._turns.run(read))

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Float32[np.ndarray, "T V"]]:
        """Logits after every token of each sequence. Raises `PromptError` as `run` does for prompts."""
        self.check_open()
        just_one = [1] * len(sequences)
        self.check(sequences, just_one)
        capacity = capacity_of([*map(len, sequences)], just_one)

        def read() -> Generator[list[np.ndarray], None, None]:
            self._begin()
            yield self._reader.logits(sequences, capacity=capacity, offload=self._offload, hold=self._hold)

        return next(self._turns.run(read))

    def refill(self, write: Callable[[Model], Model]) -> None:
        """Other weights of the same shapes, without a new program. While nothing runs or moves, `write` fills the pools
        and returns the model with its new dense weights; then every slot is empty."""
        self.check_open()

        def fill() -> Generator[None, None, None]:
            self._begin()
            jax.block_until_ready(self._offload)
            self._model = self._reader.model = write(self.model)
            self._new_offload()
            yield

        next(self._turns.run(fill))

    def _new_offload(self) -> Offload:
        """An empty cache, or one that holds what its policy keeps from the start."""
        spec = self.model.spec
        self._offload = jax.device_put(_empty_offload(self.config), self.device)
        if self.plan.slots == spec.num_keys:
            self._keep(np.ones(spec.num_keys, bool))
        elif self.policy == "full":
            self._keep(np.arange(spec.num_keys) < self.plan.slots - least_slots(spec, self.max_batch))
        return self._offload

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> None:
        """Raises what `run` would for these prompts and lengths."""
        check_prompts(
            prompts, max_new_tokens, self.model.spec, slots=self.plan.slots, context=self.context,
            max_batch=self.max_batch,
        )  # fmt: skip

    def _events(self, *asked: Any) -> Generator[TokenEvent, None, None]:
        """`_run` when its turn has come."""
        try:
            yield from self._run(*asked)
        finally:
            if self._turns.closed:  # from inside this generation
                self._release()

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        sampling: Sequence[SamplingConfig],
        eos_token_ids: Sequence[int],
    ) -> Iterator[TokenEvent]:
        started, compiled_before, transferred_before = time.perf_counter(), self.programs.compile_s, self._transferred()
        size = lanes_for(len(prompts))  # the rest is padding that is done
        params, *alone, eos_ids = jax.device_put(
            (SamplingParams.of(sampling, size), *(SamplingParams.of([each], 1) for each in sampling),
             np.array(list(eos_token_ids) or [-1], np.int32)), self.device
        )  # fmt: skip
        batch = _Batch(
            size=size,
            capacity=capacity_of([*map(len, prompts)], max_new_tokens),
            sampling=params,
            of_each=alone,
            eos_token_ids=eos_ids,
            config=self._step_config(sampling[0].greedy),
        )
        stats = self.last_stats = self._new_stats(sum(map(len, prompts)))
        prefill, decode, lanes = Counts(), Counts(), Lanes(len(prompts), size)
        steps = max(max_new_tokens) - 1
        self._begin()
        program = self._step_program(batch) if steps else None
        sequences, first = self._prefill(prompts, max_new_tokens, batch)
        # Before the first token goes out, so that text is not held up right after it began.
        step = program() if program is not None else None
        engine = self.transfers
        try:
            jax.block_until_ready(first.packed)
            if engine is not None:
                engine.start(self._offload.cache.blocks)
            stats.ttft_s = time.perf_counter() - started - (self.programs.compile_s - compiled_before)
            yield from lanes.read(first, prefill)
            decode_started, first_new = time.perf_counter(), lanes.tokens

            def dispatch() -> StepOutput:
                nonlocal sequences
                assert step is not None
                sequences, self._offload, output = step(sequences, *self._step_inputs(batch))
                if engine is not None:
                    engine.check(self._offload.cache.blocks)
                output.packed.copy_to_host_async()
                return output

            ahead = RUN_AHEAD if engine is None else engine.run_ahead
            for output in run_ahead(dispatch, steps=steps, ahead=ahead, wanted=lambda: lanes.running):
                if engine is not None:
                    engine.deliver(output.tasks, output.clock)
                yield from lanes.read(output, decode)
                stats.tokens_per_second = (lanes.tokens - first_new) / (time.perf_counter() - decode_started)
        finally:
            if engine is not None:
                engine.pause()
            stats.new_tokens = lanes.tokens
            stats.compile_s = self.programs.compile_s - compiled_before
            moved = self._transferred().since(transferred_before)
            stats.count(prefill, decode, moved, self.config.layout.block_bytes)

    def _step_inputs(self, batch: _Batch) -> tuple[Any, ...]:
        """The operands of a decode step, in its order, after the sequences."""
        link = None if self.transfers is None else self.transfers.link()
        predictor = None if self.predictor is None else self.predictor.weights
        constant = self.model.weights, self.model.pools, batch.sampling, batch.eos_token_ids
        return self._offload, *constant, link, predictor, self.replay

    def _step_program(self, batch: _Batch) -> Callable[[], jax.stages.Compiled]:
        """Begins to make the decode step; returns what waits for it. It is made while the prompt is read."""
        sequences, predictor = self._reader.shapes(batch.size, batch.capacity)
        offload, *constant = self._step_inputs(batch)
        operands = sequences, offload._replace(predictor=predictor), *constant
        what = (("step", *batch.key), "the decode step", jitted_step, *shapes_of(operands))
        self.programs.prepare(*what, config=batch.config)
        return partial(self.programs.get, *what, config=batch.config)

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

    def _transferred(self) -> TransferCounts:
        """What the transfer engine has done so far."""
        return self.transfers.counts() if self.transfers is not None else TransferCounts()

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

    def _begin(self) -> None:
        """Prompts begin: no task is open any more, because prefill may need every slot."""
        if self._offload.cache.blocks.is_deleted():
            # An interrupt fell between a program taking the cache and its result arriving here.
            self._offload = self._new_offload()
        if self.transfers is not None:
            jax.block_until_ready(self._offload.cache.tables)
            self.transfers.pause()
            self._offload = self._offload._replace(cache=_settled(self._offload.cache))

    def _hold(self, offload: Offload) -> None:
        self._offload = offload

    def _prefill(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], batch: _Batch
    ) -> tuple[Sequences, StepOutput]:
        """All prompts through all layers; samples the first new token of each."""
        lanes, counts = self._reader.read(
            prompts, max_new_tokens, batch=batch.size, capacity=batch.capacity, offload=self._offload, hold=self._hold
        )
        if self.policy == "prefill-hot" and self.plan.slots < self.model.spec.num_keys:
            self._keep_most_used(np.asarray(counts.tokens_per_expert))
        sequences, ends = [], []
        for index, lane in enumerate(lanes):
            # The lanes that make the batch whole draw as any other; they are done, so nothing comes of it.
            sampling = batch.of_each[min(index, len(batch.of_each) - 1)]
            args: tuple[Any, ...] = (
                lane.sequence,
                lane.reading.last,
                self.model.weights,
                sampling,
                batch.eos_token_ids,
            )
            program = self.programs.get(("first", *batch.key[2:]), "sampling", first_token, *args, config=batch.config)
            sequence, end = program(*args)
            sequences.append(sequence)
            ends.append(end)
        states = self._reader.join(lanes)
        predictor = None if self.predictor is None else self.predictor.weights
        readings = [lane.reading for lane in lanes]
        args = (
            self._offload._replace(predictor=None), tuple(sequences), tuple(each.predictor for each in readings),
            tuple(ends), tuple(each.routing for each in readings), counts.totals, predictor, self.replay,
        )  # fmt: skip
        program = self.programs.get(
            ("begin", batch.size), "the first forecast", begin_decoding, *args, config=batch.config
        )
        joined, self._offload, output = program(*args)
        return joined._replace(states=states), output

    def _keep_most_used(self, tokens_of: np.ndarray) -> None:
        """Policy prefill-hot: loads what the prompt used most and is not there yet, and fixes it."""
        room = self.plan.slots - least_slots(self.model.spec, self.max_batch)
        wanted = np.zeros(self.model.spec.num_keys, bool)
        wanted[np.argsort(-tokens_of.reshape(-1), kind="stable")[:room]] = True
        self._keep(wanted)

    def _keep(self, wanted: np.ndarray) -> None:
        """Makes the wanted keys resident for good (policies that score keys) or at least now (lru, lfu)."""
        cache = self._offload.cache
        if self.config.managed:
            # In NumPy: JAX would compile a program for each shape, and keep it.
            score = np.where(wanted, PINNED, -1).astype(np.int32)
            cache = _rescore(cache, np.stack([score, score]))
        for layer, pool in enumerate(self.model.pools):
            mask = wanted.reshape(self.config.layers, -1)[layer]
            cache = _keep(cache, pool, mask, np.int32(layer), config=self.config)
            self._offload = self._offload._replace(cache=cache)


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


_empty_offload = owned(jax.jit(empty_offload, static_argnums=0))  # one program instead of one for each array
_rescore = owned(jax.jit(rescore, donate_argnums=0))
_keep = owned(jax.jit(keep, static_argnames="config", donate_argnums=0))
_settled = owned(jax.jit(settled, donate_argnums=0))
