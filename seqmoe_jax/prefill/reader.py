"""The host's loop that reads prompts: over passes, layers and chunks (paper 8.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from seqmoe_jax.decode.replay import Replay
from seqmoe_jax.decode.state import Offload, Sequences
from seqmoe_jax.experts.cache import CacheConfig
from seqmoe_jax.experts.policy import prompt_rule_of
from seqmoe_jax.forecast.trained import TrainedPredictor
from seqmoe_jax.models.mixers import State
from seqmoe_jax.models.model import Model
from seqmoe_jax.options import Policy
from seqmoe_jax.prefill.experts import ExpertCounts
from seqmoe_jax.prefill.lengths import Chunk, Pass, passes_of
from seqmoe_jax.prefill.programs import (
    Beginning,
    PassTokens,
    Reading,
    Stream,
    apply_experts,
    begin_pass,
    begin_prompt,
    end_chunk,
    finish_chunk,
    join_states,
    route_chunk,
    score_chunk,
)
from seqmoe_jax.prefill.replay import replayed
from seqmoe_jax.programs import Programs, on_device

Hold = Callable[[Offload], None]
SequenceRouting = tuple[
    Int32[np.ndarray, "T L K"], Float32[np.ndarray, "T L K"]
]  # experts of every token, and their weights


@dataclass(kw_only=True)
class Lane:
    """One sequence while its prompt is read: device state that its programs donate and make anew."""

    sequence: Sequences  # without `states`
    layers: list[State]  # of the layers' mixers
    reading: Reading
    length: Int32[Array, " 1"]


@dataclass(kw_only=True)
class _State:
    """Device state of a reading under way."""

    lanes: list[Lane]
    counts: ExpertCounts
    offload: Offload
    hold: Hold
    capacity: int

    def update(self, **changes: Any) -> None:
        """Replaces parts of the offload state, whose old values were donated."""
        self.offload = self.offload._replace(**changes)
        self.hold(self.offload)


class PromptReader:
    """Reads prompts into a model's sequences and slot cache."""

    def __init__(
        self,
        model: Model,
        config: CacheConfig,
        programs: Programs,
        *,
        policy: Policy,
        pass_chunks: int,
        predictor: TrainedPredictor | None,
        replay: Replay | None,
        device: jax.Device,
    ):
        self.model, self.config, self.programs, self.device = model, config, programs, device
        self.predictor, self.replay = predictor, replay
        self._rule, self._pass_chunks = prompt_rule_of(policy), pass_chunks
        self._moe_index = {layer: index for index, layer in enumerate(model.spec.moe_layers)}
        # Layers and places in a pass, made once: a scalar takes as long to get to the device as a program to be
        # dispatched.
        self._scalars: dict[int, Array] = {}

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        *,
        batch: int,
        capacity: int,
        offload: Offload,
        hold: Hold,
    ) -> tuple[list[Lane], ExpertCounts]:
        """Takes all prompts through all layers. Returns a lane for each, and how they used experts.

        batch: lanes are added until there are so many; nothing is read in these.
        capacity: positions that each sequence has room for (`lengths.capacity_of`).
        offload: is donated; `hold` gets every new value of it at once, so that an interrupt finds a valid one.
        """
        state = self._begin(prompts, max_new_tokens, batch, capacity, offload, hold, self.predictor)
        weights, config = (None, None) if self.predictor is None else (self.predictor.weights, self.predictor.config)
        for each, stream, tokens in self._passes(prompts, state):
            for chunk in each.chunks:
                lane = state.lanes[chunk.sequence]
                lane.reading = self._run(
                    (chunk.width, each.length), f"the end of prompts of {chunk.width} tokens", end_chunk,
                    lane.reading, stream, tokens, lane.length, self._scalar(chunk.at), weights,
                    config=config, width=chunk.width,
                )  # fmt: skip
        return state.lanes, state.counts

    def routing(
        self, sequences: Sequence[Sequence[int]], *, capacity: int, offload: Offload, hold: Hold
    ) -> list[SequenceRouting]:
        """Reads sequences for what every token of them is routed to. The predictor is left alone."""
        shape = len(self.model.spec.moe_layers), self.model.spec.moe.top_k
        kept = [(np.zeros((len(s), *shape), np.int32), np.zeros((len(s), *shape), np.float32)) for s in sequences]
        state = self._begin(sequences, [1] * len(sequences), len(sequences), capacity, offload, hold, None)
        for each, stream, _ in self._passes(sequences, state):
            routing = jax.device_get((stream.ids, stream.weights))
            for chunk in each.chunks:
                for array, of_pass in zip(kept[chunk.sequence], routing, strict=True):
                    part = array[chunk.start : chunk.start + chunk.width]
                    part[:] = of_pass[:, chunk.at : chunk.at + len(part)].swapaxes(0, 1)
        return kept

    def logits(
        self, sequences: Sequence[Sequence[int]], *, capacity: int, offload: Offload, hold: Hold
    ) -> list[Float32[np.ndarray, "T V"]]:
        """Reads sequences for the logits after every token of them. The predictor is left alone."""
        kept = [np.zeros((len(s), self.model.spec.vocab), np.float32) for s in sequences]
        state = self._begin(sequences, [1] * len(sequences), len(sequences), capacity, offload, hold, None)
        for each, stream, _ in self._passes(sequences, state):
            for chunk in each.chunks:
                logits = self._run(
                    (chunk.width, each.length), f"the logits of {chunk.width} tokens", score_chunk, stream,
                    self.model.weights, self._scalar(chunk.at), spec=self.model.spec, width=chunk.width,
                )  # fmt: skip
                part = kept[chunk.sequence][chunk.start : chunk.start + chunk.width]
                part[:] = np.asarray(logits)[: len(part)]
        return kept

    def join(self, lanes: Sequence[Lane]) -> tuple[State, ...]:
        """The states of the lanes' mixers, layer by layer, as those of a batch. The lanes lose theirs."""
        states = []
        for index, layer in enumerate(self.model.spec.layers):
            parts = tuple(lane.layers[index] for lane in lanes)
            if len(lanes) > 1:
                shape = tuple(leaf.shape for leaf in jax.tree.leaves(parts[0]))
                parts = (self._run((layer, len(lanes), shape), "the join of prompts", join_states, parts),)
            states.append(parts[0])
            for lane in lanes:
                lane.layers[index] = None
        return tuple(states)

    def shapes(self, batch: int, capacity: int) -> tuple[Sequences, Any]:
        """The sequences and the predictor's state that decoding begins with, as shapes, dtypes and shardings."""
        states = jax.eval_shape(lambda: self._beginning(capacity, self.predictor).states(batch))
        return on_device(states, self.device)

    def _beginning(self, capacity: int, predictor: TrainedPredictor | None) -> Beginning:
        return Beginning(
            spec=self.model.spec,
            capacity=capacity,
            dtype=self.model.weights.embed.dtype,
            predictor=None if predictor is None else predictor.config,
            predictor_dtype=None if predictor is None else predictor.weights["in_proj"].dtype,
        )

    def _begin(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        batch: int,
        capacity: int,
        offload: Offload,
        hold: Hold,
        predictor: TrainedPredictor | None,
    ) -> _State:
        padding, config = batch - len(prompts), self.config
        lengths, remaining = [*map(len, prompts), *[1] * padding], [*max_new_tokens, *[0] * padding]
        totals, per_expert = np.zeros(3, np.int32), np.zeros((config.layers, config.experts), np.int32)
        numbers = [np.array([number], np.int32) for number in (*lengths, *remaining)]
        *numbers, totals, per_expert = jax.device_put([*numbers, totals, per_expert], self.device)
        lanes = []
        for length, left in zip(numbers[:batch], numbers[batch:], strict=True):
            sequence, reading = self._run(
                (capacity, predictor is not None), "the beginning of prompts", begin_prompt, length, left,
                beginning=self._beginning(capacity, predictor),
            )  # fmt: skip
            layers = list(sequence.states)
            lanes.append(Lane(sequence=sequence._replace(states=()), layers=layers, reading=reading, length=length))
        return _State(
            lanes=lanes, counts=ExpertCounts(totals, per_expert), offload=offload, hold=hold, capacity=capacity
        )

    def _passes(self, prompts: Sequence[Sequence[int]], state: _State) -> Iterator[tuple[Pass, Stream, PassTokens]]:
        """Takes pass after pass through all layers. Yields each with its stream and its tokens."""
        lengths = [*map(len, prompts)]
        for each in passes_of(lengths, self._pass_chunks):
            cut = _cut(prompts, each)
            tokens = PassTokens(*jax.device_put(cut, self.device))
            if self.replay is not None:
                before = np.zeros(each.length, np.int32)
                for chunk, rows in _rows(each):
                    before[rows] = lengths[chunk.sequence] - cut[1][rows]
                ids, recorded = replayed(self.replay, state.offload.steps, jax.device_put(before, self.device))
                tokens = tokens._replace(ids=ids, recorded=recorded)
            stream = self._run(
                (each.length,), f"embeddings of {each.length} tokens", begin_pass,
                self.model.weights.embed, tokens.ids, spec=self.model.spec, dtype=self.model.weights.embed.dtype,
            )  # fmt: skip
            for layer in range(len(self.model.spec.layers)):
                stream = self._layer(layer, stream, tokens, each, state)
            yield each, stream, tokens

    def _layer(self, index: int, stream: Stream, tokens: PassTokens, each: Pass, state: _State) -> Stream:
        layer, weights = self.model.spec.layers[index], self.model.weights.layers[index]
        moe_index = self._moe_index.get(index)
        layer_at = self._scalar(moe_index or 0)
        for chunk in each.chunks:
            lane, width = state.lanes[chunk.sequence], chunk.width
            stream, lane.layers[index] = self._run(
                (layer, width, each.length, state.capacity), f"a layer for prompts of {width} tokens", route_chunk,
                stream, lane.layers[index], weights, tokens, self._scalar(chunk.at), layer_at, layer=layer,
                width=width, implementation=self.config.implementation,
            )  # fmt: skip
        if moe_index is None:
            return stream
        # The experts' outputs are large: none is kept when the next layer begins.
        cache, forecast, state.counts, out, place = self._run(
            (each.length,), "the experts of a layer", apply_experts,
            state.offload.cache, state.offload.forecast, state.counts, stream.normed, stream.ids,
            self.model.pools[moe_index], layer_at, config=self.config, rule=self._rule,
        )  # fmt: skip
        state.update(cache=cache, forecast=forecast)
        for chunk in each.chunks:
            stream = self._run(
                (layer, chunk.width, each.length), f"the end of a layer for prompts of {chunk.width} tokens",
                finish_chunk, stream, out, place, weights, self._scalar(chunk.at), layer_at, layer=layer,
                width=chunk.width,
            )  # fmt: skip
        return stream

    def _run(self, key: tuple[Any, ...], what: str, function: Any, *args: Any, **static: Any) -> Any:
        """Compiles `function` where `key` is new (see `Programs.get`), and runs it."""
        return self.programs.get((function.__name__, *key), what, function, *args, **static)(*args)

    def _scalar(self, value: int) -> Array:
        if value not in self._scalars:
            self._scalars[value] = jax.device_put(np.int32(value), self.device)
        return self._scalars[value]


_Cut = tuple[Int32[np.ndarray, " P"], Int32[np.ndarray, " P"], Bool[np.ndarray, " P"]]


def _rows(each: Pass) -> Iterator[tuple[Chunk, slice]]:
    return ((chunk, slice(chunk.at, chunk.at + chunk.width)) for chunk in each.chunks)


def _cut(prompts: Sequence[Sequence[int]], each: Pass) -> _Cut:
    """The ids of a pass's tokens, their positions, and which of them are real."""
    ids, positions = np.zeros((2, each.length), np.int32)
    valid = np.zeros(each.length, bool)
    for chunk, rows in _rows(each):
        part = np.asarray(prompts[chunk.sequence][chunk.start : chunk.start + chunk.width], np.int32)
        ids[chunk.at : chunk.at + len(part)], valid[chunk.at : chunk.at + len(part)] = part, True
        positions[rows] = np.arange(chunk.start, chunk.start + chunk.width)
    return ids, positions, valid
