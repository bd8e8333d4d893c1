"""The host's loop that reads prompts: over passes, layers and chunks (paper 8.4)."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from seqmoe_jax.decode.replay import Replay
from seqmoe_jax.decode.state import Sequences
from seqmoe_jax.experts.cache import CacheConfig
from seqmoe_jax.experts.policy import prompt_rule_of
from seqmoe_jax.forecast.trained import TrainedPredictor
from seqmoe_jax.models.mixers import State
from seqmoe_jax.models.model import Model
from seqmoe_jax.offloading import Offloading
from seqmoe_jax.options import Policy
from seqmoe_jax.prefill.experts import ExpertCounts
from seqmoe_jax.prefill.lengths import Chunk, passes_of, sizes_of
from seqmoe_jax.prefill.programs import (
    Beginning,
    ChunkTokens,
    Reading,
    Routed,
    Stream,
    apply_experts,
    begin_chunk,
    begin_pass,
    begin_prompt,
    end_chunk,
    finish_chunk,
    place_chunk,
    route_chunk,
    score_chunk,
    sum_experts,
    take_chunk,
)
from seqmoe_jax.prefill.replay import replayed
from seqmoe_jax.programs import Programs, on_device

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
class _Chunk:
    """A chunk on its way through the layers."""

    of: Chunk
    tokens: ChunkTokens
    stream: Stream


@dataclass(kw_only=True)
class _State:
    """Device state of a reading under way."""

    lanes: list[Lane]
    counts: ExpertCounts
    offloading: Offloading


class PromptReader:
    """Reads prompts into a model's sequences and slot cache."""

    def __init__(
        self,
        model: Model,
        config: CacheConfig,
        programs: Programs,
        *,
        policy: Policy,
        capacity: int,
        pass_chunks: int,
        predictor: TrainedPredictor | None,
        replay: Replay | None,
        device: jax.Device,
    ):
        """`capacity`: positions that each sequence has room for."""
        self.model, self.config, self.programs, self.device = model, config, programs, device
        self.predictor, self.replay = predictor, replay
        self._rule, self._capacity, self._pass_chunks = prompt_rule_of(policy), capacity, pass_chunks
        self._moe_index = {layer: index for index, layer in enumerate(model.spec.moe_layers)}
        # Layers and places in a pass, made once: a scalar takes as long to get to the device as a program to be
        # dispatched.
        self._scalars: dict[int, Array] = {}

    def read(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], offloading: Offloading
    ) -> Generator[None, None, tuple[list[Lane], ExpertCounts]]:
        """Takes all prompts through all layers. Returns a lane for each, and how they used experts.

        Yields after each layer of a pass: others may use the cache then.
        """
        state = self._begin(prompts, max_new_tokens, offloading, self.predictor)
        for chunks in self._passes(prompts, state):
            for chunk in chunks:
                self._end_chunk(chunk, state)
            yield
        return state.lanes, state.counts

    def routing(self, sequences: Sequence[Sequence[int]], offloading: Offloading) -> list[SequenceRouting]:
        """Reads sequences for what every token of them is routed to. The predictor is left alone."""
        shape = len(self.model.spec.moe_layers), self.model.spec.moe.top_k
        kept = [(np.zeros((len(s), *shape), np.int32), np.zeros((len(s), *shape), np.float32)) for s in sequences]
        state = self._begin(sequences, [1] * len(sequences), offloading, None)
        for chunk in chain.from_iterable(self._passes(sequences, state)):
            routing = jax.device_get((chunk.stream.ids, chunk.stream.weights))
            for array, of_chunk in zip(kept[chunk.of.sequence], routing, strict=True):
                part = array[chunk.of.start : chunk.of.start + chunk.of.width]
                part[:] = of_chunk[:, : len(part)].swapaxes(0, 1)
        return kept

    def logits(self, sequences: Sequence[Sequence[int]], offloading: Offloading) -> list[Float32[np.ndarray, "T V"]]:
        """Reads sequences for the logits after every token of them. The predictor is left alone."""
        kept = [np.zeros((len(s), self.model.spec.vocab), np.float32) for s in sequences]
        state = self._begin(sequences, [1] * len(sequences), offloading, None)
        for chunk in chain.from_iterable(self._passes(sequences, state)):
            logits = self._run(
                (chunk.of.width,), f"the logits of {chunk.of.width} tokens", score_chunk, chunk.stream,
                self.model.weights, spec=self.model.spec,
            )  # fmt: skip
            part = kept[chunk.of.sequence][chunk.of.start : chunk.of.start + chunk.of.width]
            part[:] = np.asarray(logits)[: len(part)]
        return kept

    def rehearse(self, offloading: Offloading, most: int) -> Lane:
        """Goes through all that reading up to `most` prompts at once can take, where shapes stand for arrays (see
        `warm_up`). Returns what reading leaves of a prompt."""
        state = self._begin([[0]], [1], offloading, self.predictor)
        widths, lengths = sizes_of(self._capacity, most, self._pass_chunks)
        for length in lengths:
            alone = [width for width in widths if width == length]
            for pass_of in filter(None, (alone, [width for width in widths if width < length])):
                chunks = [self._begin_chunk([0], Chunk(0, 0, width, 0), state) for width in pass_of]
                for layer in range(len(self.model.spec.layers)):
                    self._layer(layer, chunks, length, state)
                for chunk in chunks:
                    self._end_chunk(chunk, state)
        return state.lanes[0]

    @property
    def predictor_weights(self) -> dict[str, Any] | None:
        return None if self.predictor is None else self.predictor.weights

    def shapes(self, batch: int) -> tuple[Sequences, Any]:
        """The sequences and the predictor's state that decoding begins with, as shapes, dtypes and shardings."""
        states = jax.eval_shape(lambda: self._beginning(self.predictor).states(batch))
        return on_device(states, self.device)

    def _beginning(self, predictor: TrainedPredictor | None) -> Beginning:
        return Beginning(
            spec=self.model.spec,
            capacity=self._capacity,
            dtype=self.model.weights.embed.dtype,
            predictor=None if predictor is None else predictor.config,
            predictor_dtype=None if predictor is None else predictor.weights["in_proj"].dtype,
        )

    def _begin(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        offloading: Offloading,
        predictor: TrainedPredictor | None,
    ) -> _State:
        config, count = self.config, len(prompts)
        totals, per_expert = np.zeros(3, np.int32), np.zeros((config.layers, config.experts), np.int32)
        numbers = [np.array([number], np.int32) for number in (*map(len, prompts), *max_new_tokens)]
        *numbers, totals, per_expert = jax.device_put([*numbers, totals, per_expert], self.device)
        lanes = []
        for length, left in zip(numbers[:count], numbers[count:], strict=True):
            sequence, reading = self._run(
                (predictor is not None,), "the beginning of prompts", begin_prompt, length, left,
                beginning=self._beginning(predictor),
            )  # fmt: skip
            layers = list(sequence.states)
            lanes.append(Lane(sequence=sequence._replace(states=()), layers=layers, reading=reading, length=length))
        return _State(lanes=lanes, counts=ExpertCounts(totals, per_expert), offloading=offloading)

    def _passes(self, prompts: Sequence[Sequence[int]], state: _State) -> Iterator[list[_Chunk]]:
        """Takes pass after pass through all layers. Yields the chunks of each, and nothing after each layer before."""
        for each in passes_of([*map(len, prompts)], self._pass_chunks):
            chunks = [self._begin_chunk(prompts[chunk.sequence], chunk, state) for chunk in each.chunks]
            for layer in range(len(self.model.spec.layers)):
                self._layer(layer, chunks, each.length, state)
                yield []
            yield chunks

    def _begin_chunk(self, prompt: Sequence[int], chunk: Chunk, state: _State) -> _Chunk:
        ids, positions, valid = cut = _cut(prompt, chunk)
        tokens = ChunkTokens(*jax.device_put(cut, self.device))
        if self.replay is not None:
            before = jax.device_put(np.where(valid, len(prompt) - positions, 0).astype(np.int32), self.device)
            ids, recorded = replayed(self.replay, state.offloading.state.steps, before)
            tokens = tokens._replace(ids=ids, recorded=recorded)
        stream = self._run(
            (chunk.width,), f"embeddings of {chunk.width} tokens", begin_chunk, self.model.weights.embed, tokens.ids,
            spec=self.model.spec,
        )  # fmt: skip
        return _Chunk(of=chunk, tokens=tokens, stream=stream)

    def _end_chunk(self, chunk: _Chunk, state: _State) -> None:
        lane, width = state.lanes[chunk.of.sequence], chunk.of.width
        lane.reading = self._run(
            (width,), f"the end of prompts of {width} tokens", end_chunk, lane.reading, chunk.stream, chunk.tokens,
            lane.length, self.predictor_weights, config=None if self.predictor is None else self.predictor.config,
        )  # fmt: skip

    def _layer(self, index: int, chunks: Sequence[_Chunk], length: int, state: _State) -> None:
        """A layer over a pass of `length` tokens."""
        layer, weights = self.model.spec.layers[index], self.model.weights.layers[index]
        moe_index = self._moe_index.get(index)
        layer_at = self._scalar(moe_index or 0)
        whole: Routed | None = None
        for chunk in chunks:
            lane, width = state.lanes[chunk.of.sequence], chunk.of.width
            chunk.stream, lane.layers[index], routed = self._run(
                (layer, width), f"a layer for prompts of {width} tokens", route_chunk,
                chunk.stream, lane.layers[index], weights, chunk.tokens, layer_at, layer=layer,
                implementation=self.config.implementation,
            )  # fmt: skip
            if moe_index is not None:
                whole = routed if width == length else self._place(whole, routed, chunk.of.at, length)
        if moe_index is None or whole is None:
            return
        # The experts' outputs are large: none is kept when the next layer begins.
        offload = state.offloading.state
        cache, forecast, state.counts, out, place = self._run(
            (length,), "the experts of a layer", apply_experts, offload.cache, offload.forecast, state.counts, whole,
            self.model.pools[moe_index], layer_at, config=self.config, rule=self._rule,
        )  # fmt: skip
        state.offloading.update(cache=cache, forecast=forecast)
        summed = self._run((length,), "the sums over experts", sum_experts, out, place, whole.weights)
        for chunk in chunks:
            width = chunk.of.width
            part = summed
            if width != length:
                part = self._run(
                    (width, length), "a part of a pass", take_chunk, summed, self._scalar(chunk.of.at), width=width
                )
            chunk.stream = self._run(
                (layer, width), f"the end of a layer for prompts of {width} tokens", finish_chunk,
                chunk.stream, part, weights, layer=layer,
            )  # fmt: skip

    def _place(self, whole: Routed | None, chunk: Routed, at: int, length: int) -> Routed:
        """The pass with a chunk of it at its place."""
        if whole is None:
            width, active = chunk.normed.shape[1], chunk.ids.shape[1]
            whole = self._run(
                (length,), f"passes of {length} tokens", begin_pass, length=length, hidden=width, active=active,
                dtype=chunk.normed.dtype,
            )  # fmt: skip
        key = len(chunk.ids), length
        placed: Routed = self._run(key, "a part of a pass", place_chunk, whole, chunk, self._scalar(at))
        return placed

    def _run(self, key: tuple[Any, ...], what: str, function: Any, *args: Any, **static: Any) -> Any:
        """Compiles `function` where `key` is new (see `Programs.get`), and runs it."""
        return self.programs.get((function.__name__, *key), what, function, *args, **static)(*args)

    def _scalar(self, value: int) -> Array:
        if value not in self._scalars:
            self._scalars[value] = jax.device_put(np.int32(value), self.device)
        return self._scalars[value]


def _cut(
    prompt: Sequence[int], chunk: Chunk
) -> tuple[Int32[np.ndarray, " T"], Int32[np.ndarray, " T"], Bool[np.ndarray, " T"]]:
    """The ids of a chunk's tokens, their positions, and which of them are real."""
    part = prompt[chunk.start : chunk.start + chunk.width]
    ids = np.zeros(chunk.width, np.int32)
    ids[: len(part)] = part
    return ids, np.arange(chunk.start, chunk.start + chunk.width, dtype=np.int32), np.arange(chunk.width) < len(part)
