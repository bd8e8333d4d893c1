"""The host's loop that reads prompts: over passes, layers and chunks (paper 8.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from seqmoe_jax.prefill.lengths import Chunk, chunk_length, passes_of
from seqmoe_jax.prefill.programs import (
    PassTokens,
    Reading,
    Stream,
    apply_experts,
    begin_pass,
    begin_prompts,
    end_pass,
    finish_chunk,
    route_chunk,
)
from seqmoe_jax.prefill.replay import replayed
from seqmoe_jax.programs import Programs, on_device

Hold = Callable[[Offload], None]
SequenceRouting = tuple[
    Int32[np.ndarray, "T L K"], Float32[np.ndarray, "T L K"]
]  # experts of every token, and their weights


@dataclass(kw_only=True)
class _State:
    """Device state of a reading under way, which its programs donate and make anew."""

    sequences: Sequences
    layers: list[State]  # of the layers' mixers
    reading: Reading
    offload: Offload
    hold: Hold
    lengths: Int32[Array, " B"]
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
        # Layers and places in the prompt, made once: a scalar takes as long to get to the device as a program to be
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
    ) -> tuple[Sequences, Reading]:
        """Takes all prompts through all layers. Returns their sequences and what was gathered while reading.

        batch: the prompts are padded to so many; `passes_of` and the programs depend on it.
        capacity: positions that each sequence has room for (`lengths.capacity_of`).
        offload: is donated; `hold` gets every new value of it at once, so that an interrupt finds a valid one.
        """
        state = self._begin(prompts, max_new_tokens, batch, capacity, offload, hold, self.predictor)
        weights, config = (None, None) if self.predictor is None else (self.predictor.weights, self.predictor.config)
        for _, chunks, stream, tokens in self._passes(prompts, state):
            shape, reading = tokens.ids.shape, state.reading
            last, routing, predictor = self._run(
                shape, f"the end of prompts of {shape[1]} tokens", end_pass,
                reading.last, reading.routing, state.offload.predictor, stream, tokens, state.lengths,
                self._scalar(chunks), weights,
                config=config, width=min(shape[1], chunk_length(batch)),
            )  # fmt: skip
            state.reading = reading._replace(last=last, routing=routing)
            state.update(predictor=predictor)
        return state.sequences._replace(states=tuple(state.layers)), state.reading

    def routing(
        self, sequences: Sequence[Sequence[int]], *, batch: int, capacity: int, offload: Offload, hold: Hold
    ) -> list[SequenceRouting]:
        """Reads sequences for what every token of them is routed to. The predictor is left alone."""
        shape = len(self.model.spec.moe_layers), self.model.spec.moe.top_k
        kept = [(np.zeros((len(s), *shape), np.int32), np.zeros((len(s), *shape), np.float32)) for s in sequences]
        state = self._begin(sequences, [1] * len(sequences), batch, capacity, offload, hold, None)
        for start, _, stream, _ in self._passes(sequences, state):
            routing = jax.device_get((stream.ids, stream.weights))
            for row, of_sequence in enumerate(kept):
                for array, of_pass in zip(of_sequence, routing, strict=True):
                    part = array[start : start + of_pass.shape[2]]
                    part[:] = of_pass[:, row, : len(part)].swapaxes(0, 1)
        return kept

    def shapes(self, batch: int, capacity: int) -> tuple[Sequences, Any]:
        """The sequences and the predictor's state that `read` will leave, as shapes, dtypes and shardings."""
        begin = partial(begin_prompts, **self._beginning(capacity, self.predictor))
        number = jax.ShapeDtypeStruct((batch,), np.int32)
        sequences, _, state = jax.eval_shape(begin, number, number)
        return on_device((sequences, state), self.device)

    def _beginning(self, capacity: int, predictor: TrainedPredictor | None) -> dict[str, Any]:
        return dict(
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
        padding = batch - len(prompts)
        lengths, remaining = jax.device_put(
            (
                np.array([*map(len, prompts), *[1] * padding], np.int32),
                np.array([*max_new_tokens, *[0] * padding], np.int32),
            ),
            self.device,
        )
        sequences, reading, recurrent = self._run(
            (batch, capacity, predictor is not None), "the beginning of prompts", begin_prompts, lengths, remaining,
            **self._beginning(capacity, predictor),
        )  # fmt: skip
        state = _State(
            sequences=sequences, layers=list(sequences.states), reading=reading, offload=offload, hold=hold,
            lengths=lengths, capacity=capacity,
        )  # fmt: skip
        if predictor is not None:
            state.update(predictor=recurrent)
        return state

    def _passes(self, prompts: Sequence[Sequence[int]], state: _State) -> Iterator[tuple[int, int, Stream, PassTokens]]:
        """Takes pass after pass through all layers. Yields where it starts, its chunks, its stream and its tokens."""
        batch = state.lengths.shape[0]
        for start, length, chunks in passes_of(max(map(len, prompts)), batch, self._pass_chunks):
            ids, valid = jax.device_put(_cut(prompts, start, length, batch), self.device)
            stream, tokens = self._run(
                (batch, length), f"embeddings of {length} tokens", begin_pass,
                self.model.weights.embed, ids, valid, self._scalar(start),
                spec=self.model.spec, dtype=self.model.weights.embed.dtype,
            )  # fmt: skip
            if self.replay is not None:
                ids, recorded = replayed(self.replay, state.offload.steps, state.lengths, tokens.positions)
                tokens = tokens._replace(ids=ids, recorded=recorded)
            for layer in range(len(state.layers)):
                stream = self._layer(layer, stream, tokens, chunks, state)
            yield start, len(chunks), stream, tokens

    def _layer(self, index: int, stream: Stream, tokens: PassTokens, chunks: Sequence[Chunk], state: _State) -> Stream:
        layer, weights, shape = self.model.spec.layers[index], self.model.weights.layers[index], tokens.ids.shape
        moe_index = self._moe_index.get(index)
        at = self._scalar(moe_index or 0)
        for start, width in chunks:
            stream, state.layers[index] = self._run(
                (layer, width, *shape, state.capacity), f"a layer for prompts of {width} tokens", route_chunk,
                stream, state.layers[index], weights, tokens, self._scalar(start), at, layer=layer, width=width,
                implementation=self.config.implementation,
            )  # fmt: skip
        if moe_index is None:
            return stream
        # The experts' outputs are large: none is kept when the next layer begins.
        cache, forecast, counts, out, place = self._run(
            shape, "the experts of a layer", apply_experts,
            state.offload.cache, state.offload.forecast, state.reading.counts, stream.normed, stream.ids,
            self.model.pools[moe_index], at, config=self.config, rule=self._rule,
        )  # fmt: skip
        state.update(cache=cache, forecast=forecast)
        state.reading = state.reading._replace(counts=counts)
        for start, width in chunks:
            stream = self._run(
                (layer, width, *shape), f"the end of a layer for prompts of {width} tokens", finish_chunk,
                stream, out, place, weights, self._scalar(start), at, layer=layer, width=width,
            )  # fmt: skip
        return stream

    def _run(self, key: tuple[Any, ...], what: str, function: Any, *args: Any, **static: Any) -> Any:
        """Compiles `function` where `key` is new (see `Programs.get`), and runs it."""
        return self.programs.get((function.__name__, *key), what, function, *args, **static)(*args)

    def _scalar(self, value: int) -> Array:
        if value not in self._scalars:
            self._scalars[value] = jax.device_put(np.int32(value), self.device)
        return self._scalars[value]


def _cut(
    prompts: Sequence[Sequence[int]], start: int, length: int, batch: int
) -> tuple[Int32[np.ndarray, "B P"], Bool[np.ndarray, "B P"]]:
    """The prompts' tokens from `start` on, padded, and which of them are real."""
    ids, valid = np.zeros((batch, length), np.int32), np.zeros((batch, length), bool)
    for row, prompt in enumerate(prompts):
        part = np.asarray(prompt[start : start + length], np.int32)
        ids[row, : len(part)], valid[row, : len(part)] = part, True
    return ids, valid
