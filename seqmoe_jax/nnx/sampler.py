"""A sampler of the form that Tunix's trainers take, over an engine that offloads experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from flax import nnx
from jaxtyping import Float32, Int32

from seqmoe_jax.errors import CheckpointError, ConfigError, PromptError
from seqmoe_jax.options import EngineKeywords, SamplingConfig
from seqmoe_jax.text import TokenIds
from seqmoe_jax.zoo.engine import from_nnx
from seqmoe_jax.zoo.layouts import Paths, Zoo
from seqmoe_jax.zoo.load import NNXModel


@dataclass(frozen=True, kw_only=True)
class SamplerOutput:
    """What came of each prompt, in their order; of several samples for a prompt, these one after the other.

    `logits[i]` are those that each new token was drawn from, before temperature and filters, and `logprobs[i]` the
    token's own; both are read from the whole sequence once it is complete. `routed_experts[i]` are the experts that
    every token of prompt and continuation goes to, `[length, layers, K]`.
    """

    text: list[str]
    logits: list[Float32[np.ndarray, "_ V"]] | None
    tokens: list[Int32[np.ndarray, " _"]] | Int32[np.ndarray, "N _"]
    padded_prompt_tokens: Int32[np.ndarray, "N _"]  # zeros on the left
    logprobs: list[list[float]] | None
    routed_experts: list[Int32[np.ndarray, "_ L K"]] | None = None


class Sampler:
    """Generates from a Flax NNX model whose experts are offloaded; `update_params` follows its training.

    It has the methods of Tunix's `BaseSampler`. The module is left whole, for it is somebody's to train.
    """

    def __init__(
        self,
        transformer: nnx.Module,
        tokenizer: Any = None,
        layout: Zoo | str | Mapping[str, Paths] = "tunix",
        *,
        config: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
        **options: Unpack[EngineKeywords],
    ):
        """Arguments are those of `from_nnx`, and raise as there."""
        self._transformer, self._layout, self._config = transformer, layout, config or {}
        self.engine = from_nnx(
            transformer, layout, config=config, tokenizer=tokenizer, eos_token_ids=eos_token_ids, release=False,
            **options,
        )  # fmt: skip

    @property
    def transformer(self) -> nnx.Module:
        return self._transformer

    @property
    def transformer_state(self) -> Any:
        return nnx.state(self._transformer)

    def tokenize(self, input_string: str) -> Int32[np.ndarray, " T"]:
        """Raises `PromptError` where there is no tokenizer."""
        return np.array(self.engine.request(input_string, max_new_tokens=1).tokens, np.int32)

    def update_params(self, params: nnx.Module | Any) -> None:
        """The model's weights after a step of training: a state of its module (all of it, or the part that changed), or
        a module.

        They are written where the old ones lie, when no generation runs: nothing is compiled anew, and every slot is
        empty after it. Raises `CheckpointError` where they are not of the same shapes and dtypes; then nothing has
        changed.
        """
        module = params
        if not isinstance(module, nnx.Module):
            graph, state = nnx.split(self._transformer)
            module = nnx.merge(graph, state, copy=True)
            nnx.update(module, params)
        found = NNXModel(module, self._layout, self._config, release=False)
        model = self.engine.token_engine.model
        if found.spec != model.spec:
            raise CheckpointError("expected new weights of the same model, got others: build a new Sampler for them")
        self.engine.token_engine.refill(found.refill)
        nnx.update(self._transformer, nnx.state(module))

    def __call__(
        self,
        input_strings: str | Sequence[str] | Sequence[Sequence[int]],
        max_generation_steps: int,
        max_prompt_length: int | None = None,
        temperature: float | int = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        beam_size: int | None = None,
        seed: int | None = None,
        multi_sampling: int = 1,
        return_logits: bool = True,
        echo: bool = False,
        pad_output: bool = False,
        return_routed_experts: bool = False,
    ) -> SamplerOutput:
        """Continues each prompt, text or token ids, `multi_sampling` times.

        Sequences are decoded `max_batch` at a time. Raises `PromptError` for a prompt longer than `max_prompt_length`,
        and `ConfigError` for a beam search, which there is none of.
        """
        if beam_size not in (None, 1):
            raise ConfigError(f"beam_size must be 1 or None, got {beam_size}: tokens are drawn one by one")
        if not isinstance(multi_sampling, int) or multi_sampling < 1:
            raise ConfigError(f"multi_sampling must be at least 1, got {multi_sampling!r}")
        given: list[Any] = [input_strings] if isinstance(input_strings, str) else list(input_strings)
        drawn = SamplingConfig().override(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        each = [
            self.engine.request(prompt, max_new_tokens=max_generation_steps, index=index).tokens
            for index, prompt in enumerate(given)
        ]
        for index, tokens in enumerate(each):
            if max_prompt_length is not None and len(tokens) > max_prompt_length:
                raise PromptError(f"prompt {index} has {len(tokens)} tokens, max_prompt_length is {max_prompt_length}")
        prompts = [tokens for tokens in each for _ in range(multi_sampling)]
        size, new, text = self.engine.token_engine.max_batch, [], []
        for at in range(0, len(prompts), size):
            sampling = drawn if seed is None else drawn.override(seed=(drawn.seed + at) % 2**32)
            part = self.engine.generate(prompts[at : at + size], max_new_tokens=max_generation_steps, sampling=sampling)
            new += [np.array(out.tokens, np.int32) for out in part]
            text += [out.text for out in part]
        whole = [[*prompt, *tokens.tolist()] for prompt, tokens in zip(prompts, new, strict=True)]
        logits, logprobs = self._scores(prompts, whole) if return_logits else (None, None)
        if echo and not isinstance(self.engine.tokenizer, TokenIds):
            text = [self.engine.tokenizer.decode(tokens) for tokens in whole]
        return SamplerOutput(
            text=text,
            logits=logits,
            tokens=_padded(new, left=False) if pad_output else new,
            padded_prompt_tokens=_padded(prompts, left=True, width=max_prompt_length),
            logprobs=logprobs,
            routed_experts=[self.engine.routing(tokens).ids for tokens in whole] if return_routed_experts else None,
        )

    def _scores(
        self, prompts: Sequence[Sequence[int]], whole: Sequence[Sequence[int]]
    ) -> tuple[list[np.ndarray], list[list[float]]]:
        logits, logprobs = [], []
        for prompt, tokens in zip(prompts, whole, strict=True):
            rows = self.engine.logits(tokens[:-1])[len(prompt) - 1 :]
            highest = rows.max(-1)
            total = highest + np.log(np.exp(rows - highest[:, None]).sum(-1))
            logits.append(rows)
            logprobs.append((rows[np.arange(len(rows)), tokens[len(prompt) :]] - total).tolist())
        return logits, logprobs


def _padded(rows: Sequence[Sequence[int] | np.ndarray], *, left: bool, width: int | None = None) -> np.ndarray:
    """Rows as one array, zeros where they are shorter."""
    out = np.zeros((len(rows), width or max(map(len, rows), default=0)), np.int32)
    for row, values in zip(out, rows, strict=True):
        start = len(row) - len(values) if left else 0
        row[start : start + len(values)] = values
    return out
