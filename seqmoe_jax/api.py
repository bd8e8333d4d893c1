"""The public face: `load` gives an `Engine`, `generate` is one line, both in text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, Unpack, overload

import numpy as np
from jaxtyping import Array, Float32, Int32, Integer

from seqmoe_jax.checkpoints.resolve import read_config
from seqmoe_jax.compilation import enable_compilation_cache
from seqmoe_jax.display import percent, preformatted, table
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.errors import CheckpointError, ConfigError, PromptError
from seqmoe_jax.fields import shown
from seqmoe_jax.generation import Request, Run
from seqmoe_jax.loading import find_and_load_predictor, load_model, random_model
from seqmoe_jax.memory.fit import check_fits
from seqmoe_jax.options import EngineKeywords, EngineOptions, GenerateKeywords, GenerateOptions, SamplingConfig
from seqmoe_jax.presets import preset_path
from seqmoe_jax.progress import ProgressBar, say, shows_progress
from seqmoe_jax.stats import Stats
from seqmoe_jax.text import (
    ByteTokenizer,
    Chat,
    TokenIds,
    Tokenizer,
    chat_of,
    encode_prompt,
    eos_token_ids,
    model_sampling,
    open_tokenizer,
)

TokenPrompt = Sequence[int] | Integer[np.ndarray, " T"] | Integer[Array, " T"]  # token ids instead of text
Prompts = Sequence[str] | Sequence[TokenPrompt]  # decoded together
Messages = Sequence[Mapping[str, Any]]  # a conversation: [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, kw_only=True, repr=False)
class Generation:
    """What came of one prompt; `print` shows its text.

    `tokens` are the new ones, an end token included; `text` leaves that out, and is empty where the engine has no
    tokenizer. `finish_reason` is "stop" (an end token or a stop string), "length", or "error": then `error` says which,
    and text and tokens are those before it. `stats` are those of the whole batch.
    `reasoning` is what a model with channels (GPT-OSS) says before its answer; other models' thoughts are in the text.
    """

    text: str
    reasoning: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    error: str | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Generation({shown(self.text)}, {len(self.tokens)} tokens, {self.finish_reason}, {self.stats!r})"

    def _repr_html_(self) -> str:
        why = self.finish_reason if self.error is None else f"{self.finish_reason}: {self.error}"
        return (
            preformatted(f"{len(self.tokens)} tokens, {why}", self.text or str(self.tokens)) + self.stats._repr_html_()
        )


class Routing(NamedTuple):
    """Where every token of a sequence went in every MoE layer."""

    tokens: Int32[np.ndarray, " T"]
    ids: Int32[np.ndarray, "T L K"]  # experts, as the router chose them
    weights: Float32[np.ndarray, "T L K"]  # theirs


class LoadKeywords(EngineKeywords, total=False):
    """Keyword arguments of `load`."""

    random_weights: bool
    warm_up: bool
    progress: bool | None


class Keywords(LoadKeywords, GenerateKeywords, total=False):
    """Keyword arguments of the function `generate`: those of `load` and of `Engine.generate`."""


class Engine:
    """A loaded model that generates text. Made by `load`; a context manager that closes it at its end.

    One generation at a time: another thread's waits for its turn, and one begun inside an open stream is refused.
    `defaults` is how the model's makers sample it (`generation_config.json`), or why that is not supported; `chat`
    renders conversations, None where the model has no template for them.
    """

    def __init__(
        self,
        token_engine: TokenEngine,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int] = (),
        *,
        chat: Chat | None = None,
        defaults: SamplingConfig | ConfigError | None = None,
    ):
        self.token_engine, self.tokenizer, self.eos_token_ids = token_engine, tokenizer, tuple(eos_token_ids)
        self.chat, self.defaults = chat, defaults or SamplingConfig()

    def close(self) -> None:
        """Gives back its memory, its programs and its thread. What is open ends with an `EngineError` at its next
        token, as does every later call; closing twice is closing once. An engine that nobody refers to is closed by
        itself."""
        self.token_engine.close()

    def __enter__(self) -> Engine:
        self.token_engine.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def stats(self) -> Stats:
        """Of the last generation."""
        return self.token_engine.last_stats

    @property
    def name(self) -> str:
        """What the model is called. Raises `EngineError` after `close`."""
        return self.token_engine.model.name

    def __repr__(self) -> str:
        if self.token_engine.closed:
            return "Engine(closed)"
        return f"Engine({self.name}: {', '.join(f'{name} {value}' for name, value in self._about().items())})"

    def _repr_html_(self) -> str:
        if self.token_engine.closed:
            return table("Engine, closed", {})
        plan = self.token_engine.plan
        rows = self._about() | {"memory": plan.describe(), "model": repr(self.token_engine.model)}
        return table(f"Engine of {self.name}", rows, bar=(f"residency ({plan.slots} slots)", plan.residency))

    def _about(self) -> dict[str, object]:
        engine = self.token_engine
        return {
            "residency": percent(engine.plan.residency),
            "policy": engine.policy,
            "forecast": engine.forecast_name,
            "transfers": engine.transfers_name,
            "max_batch": engine.max_batch,
            "context": engine.context,
            "on": engine.device,
        }

    def routing(self, prompt: str | TokenPrompt | None = None, *, messages: Messages | None = None) -> Routing:
        """The experts that every token of a prompt is routed to, as NumPy arrays. Exact at any residency.

        Raises `PromptError` or `EngineError` as `generate` does.
        """
        tokens = self.request(prompt, messages=messages, max_new_tokens=1).tokens
        ((ids, weights),) = self.token_engine.routing([tokens])
        return Routing(tokens=np.array(tokens, np.int32), ids=ids, weights=weights)

    def logits(
        self, prompt: str | TokenPrompt | None = None, *, messages: Messages | None = None
    ) -> Float32[np.ndarray, "T V"]:
        """The logits after every token of a prompt, `[T, V]` as a NumPy array: row t is for token t + 1. Exact at any
        residency. Of a long prompt they are large: 4 T V bytes of host memory.

        Raises `PromptError` or `EngineError` as `generate` does.
        """
        (logits,) = self.token_engine.logits([self.request(prompt, messages=messages, max_new_tokens=1).tokens])
        return logits

    @overload
    def generate(self, prompt: str | TokenPrompt, **options: Unpack[GenerateKeywords]) -> Generation: ...
    @overload
    def generate(self, prompt: Prompts, **options: Unpack[GenerateKeywords]) -> list[Generation]: ...
    @overload
    def generate(self, *, messages: Messages, **options: Unpack[GenerateKeywords]) -> Generation: ...
    @overload
    def generate(self, *, messages: Sequence[Messages], **options: Unpack[GenerateKeywords]) -> list[Generation]: ...
    def generate(
        self,
        prompt: str | TokenPrompt | Prompts | None = None,
        *,
        messages: Messages | Sequence[Messages] | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> Generation | list[Generation]:
        """One prompt in, one `Generation` out; a list in (up to `max_batch`, decoded together), a list out.

        Args:
          prompt: text to continue, or its token ids (a list of integers or an array `[T]`); or several of either.
          messages: instead, a conversation to be answered, `[{"role": "user", "content": ...}]`, or a list of them.
          options: the fields of `GenerateOptions`, which says what they are.

        Raises `PromptError`, `ConfigError`, `ResidencyError` or `EngineError`; and `NonFiniteError` where the logits of
        a single prompt are no numbers. Of several prompts that one has `error`, and the others go on.
        """
        requests, single = self._requests(prompt, messages, GenerateOptions(**options))
        run = self.run(requests)
        for piece in run:
            if single and piece.fault is not None:
                raise piece.fault
        results = [
            Generation(
                text=answer.reply.text,
                reasoning=answer.reply.reasoning,
                tokens=answer.tokens,
                finish_reason=answer.finish_reason or "length",
                stats=self.stats,
                error=None if answer.fault is None else str(answer.fault),
            )
            for answer in run.answers.values()
        ]
        return results[0] if single else results

    def stream(
        self,
        prompt: str | TokenPrompt | None = None,
        *,
        messages: Messages | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> Iterator[str]:
        """The same text as `generate` gives for one prompt or one conversation, in pieces as they are decided."""
        requests, _ = self._requests(prompt, messages, GenerateOptions(**options))
        return _texts(self.run(requests))

    def stream_tokens(
        self,
        prompt: str | TokenPrompt | None = None,
        *,
        messages: Messages | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> Iterator[int]:
        """The same tokens as `generate` gives, an end token included, as they are decided."""
        requests, _ = self._requests(prompt, messages, GenerateOptions(**options))
        return _tokens(self.run(requests))

    def run(self, requests: Sequence[Request] = (), *, poll: Callable[[], None] | None = None) -> Run:
        """Requests decoded together, each with its own options; iterate over it for their text as it comes. `poll` is
        called often meanwhile, and may add others."""
        return Run(self.token_engine, self.tokenizer, self.eos_token_ids, requests, poll=poll)

    def request(
        self,
        prompt: str | TokenPrompt | None = None,
        *,
        messages: Messages | None = None,
        chat_options: Mapping[str, Any] | None = None,
        max_new_tokens: int | None = None,
        sampling: SamplingConfig | None = None,
        stop: Sequence[str] = (),
        index: int = 0,
    ) -> Request:
        """One prompt (text or token ids) or conversation, encoded. `max_new_tokens` None: what the context leaves.

        Raises `PromptError`, with `index` to say which of several it was.
        """
        self.token_engine.check_open()
        if (prompt is None) == (messages is None):
            raise PromptError("give either a prompt or messages")
        if stop and isinstance(self.tokenizer, TokenIds):
            raise PromptError("stop strings need a tokenizer, and this engine has none; give eos_token_ids instead")
        chat, prompt = None, _listed(prompt)
        if messages is not None:
            if (chat := self.chat) is None:
                raise PromptError("this model has no chat template; give a prompt instead of messages")
            text = chat.prompt(messages, **(chat_options or {}))
            tokens = encode_prompt(self.tokenizer, text, index, add_special_tokens=False)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, str):
            tokens = list(prompt)
            if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in tokens):
                raise PromptError(f"prompt {index}: expected text or token ids, got a list of something else")
            vocab = self.token_engine.model.spec.vocab
            if not all(0 <= token < vocab for token in tokens):  # before a tokenizer sees them
                raise PromptError(f"prompt {index} has a token id outside the vocabulary of {vocab}")
        else:
            tokens = encode_prompt(self.tokenizer, prompt, index)
        # At least one: a prompt that fills the context is refused where all lengths are.
        new = max(1, self.token_engine.context - len(tokens)) if max_new_tokens is None else max_new_tokens
        return Request(
            tokens=tokens, max_new_tokens=new, sampling=sampling or SamplingConfig(), stop=tuple(stop), chat=chat
        )

    def _requests(
        self,
        prompt: str | TokenPrompt | Prompts | None,
        messages: Messages | Sequence[Messages] | None,
        options: GenerateOptions,
    ) -> tuple[list[Request], bool]:
        """The requests of a batch, and whether a single prompt or conversation was given."""
        each, single = _each(prompt, messages)
        drawn = options.sampling_over(self.defaults).spread(len(each))
        requests = [
            self.request(
                **one, chat_options=options.chat_options, max_new_tokens=options.max_new_tokens, sampling=sampling,
                stop=options.stop, index=index,
            )
            for index, (one, sampling) in enumerate(zip(each, drawn, strict=True))
        ]  # fmt: skip
        return requests, single


def load(
    model: str | Path = "demo",
    *,
    random_weights: bool = False,
    warm_up: bool = False,
    progress: bool | None = None,
    **options: Unpack[EngineKeywords],
) -> Engine:
    """A model into memory: dense weights and a slot cache on the device, all experts in pinned host memory.

    Args:
      model: a directory, a Hugging Face id, `"demo"`, or (with `random_weights`) the name of a preset in `configs/`.
      random_weights: real shapes, meaningless text.
      warm_up: compile now whatever requests can need, so that none of them waits for the compiler.
      progress: bars and messages on standard error. Default: if that is a terminal, or in a notebook.
      options: the fields of `EngineOptions`, which says what they are.

    Raises `CheckpointError`, `ConfigError`, `PredictorError` or `ResidencyError`, in one line that says what to do.
    """
    if not isinstance(model, str | Path):
        kind = type(model).__name__
        raise CheckpointError(
            f"load takes a directory, a Hugging Face id or a name, got {kind}; a Flax NNX module goes to from_nnx"
        )
    chosen = EngineOptions(**options)
    enable_compilation_cache()
    visible = shows_progress(progress)
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...] = ()
    chat = defaults = None
    fits = partial(check_fits, options=chosen)
    with ProgressBar(visible, f"loading {model}") as bar:
        if random_weights:
            loaded = random_model(
                preset_path(str(model)), dtype=chosen.dtype, name=str(model), progress=bar, check=fits
            )
            tokenizer = ByteTokenizer(vocab=loaded.spec.vocab)
        else:
            loaded, directory = load_model(model, dtype=chosen.dtype, progress=bar, check=fits)
            family = str(read_config(directory)["model_type"])
            tokenizer = open_tokenizer(directory, family)
            eos_ids = eos_token_ids(directory, family)
            chat, defaults = chat_of(directory, family), _sampling_or_why_not(directory)
    engine = TokenEngine(
        loaded,
        chosen,
        predictor=find_and_load_predictor(chosen.predictor, loaded) if chosen.policy == "seqmoe" else None,
        vocab=tokenizer.vocab,
        announce=say if visible and not warm_up else None,
    )
    if warm_up:
        with ProgressBar(visible, "compiling", unit="programs") as bar:
            engine.warm_up(bar)
    return Engine(engine, tokenizer, eos_ids, chat=chat, defaults=defaults)


@overload
def generate(model: str | Path, prompt: str | TokenPrompt, **options: Unpack[Keywords]) -> Generation: ...
@overload
def generate(model: str | Path, prompt: Prompts, **options: Unpack[Keywords]) -> list[Generation]: ...
@overload
def generate(model: str | Path, *, messages: Messages, **options: Unpack[Keywords]) -> Generation: ...
@overload
def generate(model: str | Path, *, messages: Sequence[Messages], **options: Unpack[Keywords]) -> list[Generation]: ...
def generate(
    model: str | Path,
    prompt: str | TokenPrompt | Prompts | None = None,
    *,
    messages: Messages | Sequence[Messages] | None = None,
    **options: Unpack[Keywords],
) -> Generation | list[Generation]:
    """Loads a model, generates once, and lets go of it. `options` are those of `load` and of `Engine.generate`.

    >>> generate("demo", "def fibonacci(n):", max_new_tokens=64, residency=0.45).text  # doctest: +SKIP
    """
    each, _ = _each(prompt, messages)
    how = {name: value for name, value in options.items() if name in GenerateKeywords.__annotations__}
    GenerateOptions(**how)  # type: ignore[arg-type]  # a fault in them shows before a model is loaded
    what = {name: value for name, value in options.items() if name not in how}
    with load(model, **{"max_batch": max(1, len(each)), **what}) as engine:  # type: ignore[arg-type]
        return engine.generate(prompt, messages=messages, **how)  # type: ignore[call-overload]


def _texts(run: Run) -> Iterator[str]:
    for piece in run:
        if piece.text:
            yield piece.text
        if piece.fault is not None:
            raise piece.fault


def _tokens(run: Run) -> Iterator[int]:
    for piece in run:
        if piece.fault is not None:
            raise piece.fault
        yield run.answers[0].tokens[-1]


def _sampling_or_why_not(directory: Path) -> SamplingConfig | ConfigError:
    """How the model's makers sample it. Not to support that is no fault where nobody asks for it."""
    try:
        return model_sampling(directory)
    except ConfigError as error:
        return error


def _each(
    prompt: str | TokenPrompt | Prompts | None, messages: Messages | Sequence[Messages] | None
) -> tuple[list[dict[str, Any]], bool]:
    """Every prompt or conversation as an argument of `Engine.request`, and whether a single one was given."""
    if (prompt is None) == (messages is None):
        raise PromptError("give either a prompt or messages")
    name, given = ("prompt", _listed(prompt)) if messages is None else ("messages", messages)
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise PromptError(f"{name} must be one or a list of them, got {type(given).__name__}")
    # A conversation is itself a list, of messages, and token ids are one of integers.
    one = Mapping if name == "messages" else Integral
    single = isinstance(given, str) or bool(given and isinstance(given[0], one))
    return [{name: _listed(each)} for each in ([given] if single else given)], single


def _listed(given: Any) -> Any:
    """Arrays as lists."""
    return given.tolist() if hasattr(given, "tolist") else given
