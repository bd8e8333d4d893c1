"""Reading prompts: the host's loop over passes, layers, chunks and groups of streamed experts (paper 8.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from seqmoe_jax.decode.step import Offload, Replay, Sequences, empty_sequences
from seqmoe_jax.errors import PromptError, ResidencyError
from seqmoe_jax.experts.cache import CacheConfig
from seqmoe_jax.experts.policy import Policy, prompt_rule_of
from seqmoe_jax.forecast.trained import TrainedPredictor
from seqmoe_jax.memory.plan import kv_capacity, least_slots
from seqmoe_jax.models.model import Model
from seqmoe_jax.models.spec import LayerSpec, ModelSpec
from seqmoe_jax.models.weights import LayerWeights
from seqmoe_jax.options import MAX_BATCH
from seqmoe_jax.prefill.experts import Tally
from seqmoe_jax.prefill.programs import (
    PASS_CHUNKS,
    Stream,
    Tokens,
    add_experts,
    begin_experts,
    begin_pass,
    bucket,
    chunk_length,
    chunks_of,
    finish_chunk,
    keep_last,
    route_chunk,
    warm_predictor,
)
from seqmoe_jax.prefill.streaming import Arrivals, Group, Popularity, Sender, choose_groups, group_size, make_sender

Compile = Callable[..., Any]  # (key, what, function, *arguments, **static) -> the compiled program
Keep = Callable[[Offload], None]  # takes what a program made of the offload state, whose old value was donated
Watch = Callable[[int, Int32[Array, "L B P K"], Float32[Array, "L B P K"]], None]


@dataclass(frozen=True, kw_only=True)
class ReadPrompts:
    """What reading prompts leaves behind, beside the offload state."""

    sequences: Sequences
    last: Array  # [B, *S, H], the hidden state of each prompt's last token
    tally: Tally
    pending: Float32[Array, "B keys"] | None  # routing of each prompt's last token, for the predictor
    streamed: int  # experts sent ahead


def capacity_of(prompts: Sequence[int], new: Sequence[int], batch: int) -> int:
    """Positions that a generation needs, from the lengths of its prompts and what may follow each.

    The padding of the last chunk of the longest prompt is included.
    """
    longest, chunk = max(prompts), chunk_length(batch)
    padded_end = (longest - 1) // chunk * chunk + bucket((longest - 1) % chunk + 1)
    return kv_capacity(max(padded_end, *(length + more for length, more in zip(prompts, new, strict=True))))


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """What all layers of a pass share."""

    tokens: Tokens
    parts: list[tuple[int, int]]  # (start, width) of its chunks
    groups: list[list[Group]]  # of experts, sent ahead for each MoE layer
    arrivals: Arrivals | None
    seen: Array  # tokens of the prompts up to its end
    compile: Compile
    key: tuple[int, ...]  # what the compiled programs depend on, beside the layer


class KeptRouting:
    """Watches a reading and keeps the experts and weights of every token, without the padding."""

    def __init__(self, spec: ModelSpec, lengths: Sequence[int]):
        shape = len(spec.moe_layers), spec.moe.top_k
        self.by_sequence = [
            (np.zeros((length, *shape), np.int32), np.zeros((length, *shape), np.float32)) for length in lengths
        ]

    def __call__(self, start: int, *routing: Array) -> None:
        for kept, of_pass in zip(zip(*self.by_sequence, strict=True), jax.device_get(routing), strict=True):
            for row, array in enumerate(kept):
                size = max(0, min(of_pass.shape[2], len(array) - start))
                array[start : start + size] = of_pass[:, row, :size].swapaxes(0, 1)


class PromptReader:
    """Reads prompts into a model's sequences and slot cache. `stream` false: missing experts are loaded on demand."""

    def __init__(
        self,
        model: Model,
        config: CacheConfig,
        *,
        policy: Policy,
        predictor: TrainedPredictor | None,
        replay: Replay | None,
        device: jax.Device,
        stream: bool,
    ):
        self.model, self.config, self.device = model, config, device
        self.predictor, self.replay = predictor, replay
        self._rule = prompt_rule_of(policy)
        self._group = group_size(config.layout, config.experts)
        self._sender: Sender | None = None
        if stream and config.managed and config.slots < config.layers * config.experts:
            self._sender = make_sender(model.pools, device, self._group)
        profile = None if predictor is None else predictor.weights.get("popularity")
        self.popularity = Popularity(
            config.layers, config.experts, model.spec.moe.top_k, None if profile is None else np.asarray(profile)
        )
        # Layers and places in the prompt, made once: a scalar takes as long to get to the device as a program to be
        # dispatched.
        self._scalars: dict[int, Array] = {}
        self._nothing_sent = jax.device_put(np.zeros(config.experts, bool), device)

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        batch: int,
        capacity: int,
        max_new_tokens: Sequence[int],
        offload: Offload,
        compile: Compile,
        keep: Keep,
        watch: Watch | None = None,
    ) -> ReadPrompts:
        """All prompts through all layers, with room for what follows them.

        Consumes `offload`; `compile` is given for the call alone, or the reader would keep its engine, and that its
        device memory, alive. `keep` gets each new value at once, so that an interrupt finds what is valid. `watch` gets
        the position of each pass and its routing: nothing follows such a reading, so the predictor is left alone.
        """
        spec = self.model.spec
        lengths = np.array([len(p) for p in prompts] + [1] * (batch - len(prompts)), np.int32)
        new = np.array([*max_new_tokens, *[1] * (batch - len(prompts))], np.int32)
        real = np.arange(batch) < len(prompts)
        dtype = self.model.weights.embed.dtype
        with jax.default_device(self.device):
            sequences = empty_sequences(spec=spec, batch=batch, capacity=capacity, dtype=dtype)
            last = jnp.zeros((batch, *spec.token_shape), dtype)
            tally = Tally(jnp.zeros(3, jnp.int32), jnp.zeros((self.config.layers, self.config.experts), jnp.int32))
            pending = None
            if self.predictor is not None and watch is None:
                pending = jnp.zeros((batch, spec.num_keys), jnp.float32)
        position, remaining, done, device_lengths = jax.device_put((lengths, new, ~real, lengths.copy()), self.device)
        sequences = sequences._replace(position=position, remaining=remaining, done=done)
        states = list(sequences.states)
        longest, chunk, streamed = int(lengths.max()), chunk_length(batch), 0
        whole = chunk * PASS_CHUNKS
        for start in range(0, longest, whole):
            parts = chunks_of(min(whole, longest - start), chunk)
            length = parts[0][1] if len(parts) == 1 else len(parts) * chunk
            ids, valid = _cut(prompts, start, length, batch)
            groups = self._choose(offload, int(valid.sum()))
            streamed += sum(group.count for layer in groups for group in layer)
            arrivals = None if self._sender is None else Arrivals(self._sender, groups)
            ids, valid = jax.device_put((ids, valid), self.device)
            stream, tokens = begin_pass(
                self.model.weights.embed, ids, valid, self._scalar(start), device_lengths, offload.steps, self.replay,
                spec=spec, dtype=dtype,
            )  # fmt: skip
            seen = jax.device_put(np.int32(np.minimum(lengths, start + length)[real].sum()), self.device)
            now = _Pass(
                tokens=tokens, parts=parts, groups=groups, arrivals=arrivals, seen=seen, key=(batch, length, capacity),
                compile=compile,
            )  # fmt: skip
            stream, states, offload, tally = self._layers(stream, states, offload, tally, now, keep)
            last = keep_last(last, stream.x, self._scalar(start), device_lengths)
            if watch is not None:
                watch(start, stream.ids, stream.weights)
            elif pending is not None:
                offload, pending = self._warm(offload, pending, stream, now)
                keep(offload)
        sequences = sequences._replace(states=tuple(states))
        return ReadPrompts(sequences=sequences, last=last, tally=tally, pending=pending, streamed=streamed)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    @property
    def sender_name(self) -> str:
        return "none" if self._sender is None else self._sender.name

    def observe(self, tally: Tally, tokens: int) -> None:
        """Learns which experts prompts use, from one of `tokens` tokens that has been read; if anybody will ask."""
        if self._sender is not None:
            self.popularity.observe(np.asarray(tally.tokens_of), tokens)

    def _choose(self, offload: Offload, tokens: int) -> list[list[Group]]:
        if self._sender is None:
            return [[] for _ in range(self.config.layers)]
        # Streaming evicts nothing that a layer still to come would find (`staged_experts`). Loads on demand may; then
        # that is loaded on demand too.
        resident = np.asarray(offload.cache.tables.slot_of_key) >= 0
        chance = self.popularity.chance(tokens)
        return choose_groups(chance, resident.reshape(chance.shape), self._group)

    def _layers(
        self, stream: Stream, states: list[Any], offload: Offload, tally: Tally, now: _Pass, keep: Keep
    ) -> tuple[Stream, list[Any], Offload, Tally]:
        spec = self.model.spec
        moe_index = 0
        for index, (layer, weights) in enumerate(zip(spec.layers, self.model.weights.layers, strict=True)):
            at = self._scalar(moe_index)
            for start, width in now.parts:
                args = stream, states[index], weights, now.tokens, self._scalar(start), at, self.replay
                program = now.compile(
                    ("route", layer, width, *now.key), f"a layer for prompts of {width} tokens",
                    route_chunk, *args, layer=layer, width=width,
                )  # fmt: skip
                stream, states[index] = program(*args)
            if index not in spec.moe_layers:
                continue
            stream, offload, tally = self._experts(stream, weights, layer, offload, tally, moe_index, now, keep)
            moe_index += 1
        return stream, states, offload, tally

    def _experts(
        self,
        stream: Stream,
        weights: LayerWeights,
        layer: LayerSpec,
        offload: Offload,
        tally: Tally,
        moe_index: int,
        now: _Pass,
        keep: Keep,
    ) -> tuple[Stream, Offload, Tally]:
        """The second half of a MoE layer. Experts' outputs are large: none is kept when the next layer begins."""
        config, at, groups = self.config, self._scalar(moe_index), now.groups[moe_index]
        sent = self._nothing_sent
        if groups:
            mask = np.zeros(config.experts, bool)
            mask[np.concatenate([group.experts[: group.count] for group in groups])] = True
            sent = jax.device_put(mask, self.device)
        args = (offload.cache, offload.forecast, tally, stream.normed, stream.ids, sent, now.seen,
                self.model.pools[moe_index], at)  # fmt: skip
        program = now.compile(
            ("experts", *now.key[:2]), "the experts of a layer", begin_experts, *args, config=config, rule=self._rule
        )
        # The old cache is donated: what an interrupt finds must be the new one.
        cache, forecast, tally, out, blocks = program(*args)
        offload = offload._replace(cache=cache, forecast=forecast)
        keep(offload)
        for group in groups:
            assert now.arrivals is not None
            adding = (offload.cache, out, blocks, stream.normed, now.arrivals.next(),
                      jax.device_put(group.experts, self.device), tally.tokens_of, at)  # fmt: skip
            program = now.compile(
                ("streamed", *now.key[:2]), "the streamed experts of a layer", add_experts, *adding, config=config
            )
            cache, out, taken = program(*adding)
            offload = offload._replace(cache=cache)
            keep(offload)
            now.arrivals.computed(taken)
        for start, width in now.parts:
            ending = stream, out, blocks.place, weights, self._scalar(start), at
            program = now.compile(
                ("finish", layer, width, *now.key), f"the end of a layer for prompts of {width} tokens",
                finish_chunk, *ending, layer=layer, width=width,
            )  # fmt: skip
            stream = program(*ending)
        return stream, offload, tally

    def _warm(self, offload: Offload, pending: Array, stream: Stream, now: _Pass) -> tuple[Offload, Array]:
        """The predictor reads the pass."""
        assert self.predictor is not None
        state, config = offload.predictor, self.predictor.config
        for start, width in now.parts:
            args = (state, pending, self.predictor.weights, stream.ids, stream.weights, now.tokens, self._scalar(start),
                    self.replay)  # fmt: skip
            program = now.compile(
                ("warm", width, *now.key[:2]), f"the predictor for prompts of {width} tokens",
                warm_predictor, *args, config=config, width=width,
            )  # fmt: skip
            state, pending = program(*args)
        return offload._replace(predictor=state), pending

    def _scalar(self, value: int) -> Array:
        if value not in self._scalars:
            self._scalars[value] = jax.device_put(np.int32(value), self.device)
        return self._scalars[value]


def check_prompts(
    prompts: Sequence[Sequence[int]], new: Sequence[int], spec: ModelSpec, *, slots: int, context: int
) -> None:
    """Raises `PromptError` or `ResidencyError` where these prompts, and `new` tokens after each, cannot be."""
    if not 1 <= len(prompts) <= MAX_BATCH:
        raise PromptError(f"expected 1 to {MAX_BATCH} prompts at once, got {len(prompts)}")
    least = least_slots(spec, len(prompts))
    if slots < least:
        raise ResidencyError(
            f"{len(prompts)} sequences with K={spec.moe.top_k} need {least} slots, this engine has {slots}; "
            "load with a higher residency or give fewer prompts"
        )
    for index, (prompt, more) in enumerate(zip(prompts, new, strict=True)):
        if more < 1:
            raise PromptError(f"max_new_tokens must be at least 1, got {more}")
        if not prompt:
            raise PromptError(f"prompt {index} is empty: give at least one token")
        if len(prompt) + more > context:
            longer = f" or load with a context of up to {spec.context}" if context < spec.context else ""
            raise PromptError(
                f"prompt {index} has {len(prompt)} tokens and {more} new ones were asked for, "
                f"but the context is {context}; shorten the prompt, lower max_new_tokens{longer}"
            )
        if not all(0 <= token < spec.vocab for token in prompt):
            raise PromptError(f"prompt {index} has a token id outside the vocabulary of {spec.vocab}")


def _cut(
    prompts: Sequence[Sequence[int]], start: int, length: int, batch: int
) -> tuple[Int32[np.ndarray, "B P"], Bool[np.ndarray, "B P"]]:
    """The prompts' tokens from `start` on, padded, and which of them are real."""
    ids, valid = np.zeros((batch, length), np.int32), np.zeros((batch, length), bool)
    for row, prompt in enumerate(prompts):
        part = np.asarray(prompt[start : start + length], np.int32)
        ids[row, : len(part)], valid[row, : len(part)] = part, True
    return ids, valid
