"""The public face: `load` gives an `Engine`, `generate` is one line, both in text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from pallas_kernels.backend import Implementation
from seqmoe_jax.compilation import enable_compilation_cache
from seqmoe_jax.decode import STOPPED
from seqmoe_jax.engine import Stats, TokenEngine, TokenEvent
from seqmoe_jax.errors import PromptError
from seqmoe_jax.experts.policy import Policy
from seqmoe_jax.loading import load_model, random_model
from seqmoe_jax.planning import Residency, parse_bytes
from seqmoe_jax.presets import preset_path
from seqmoe_jax.sampling import SamplingConfig
from seqmoe_jax.text import ByteTokenizer, FileTokenizer, TextStream, Tokenizer, encode_prompt, end_tokens


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What came of one prompt. `tokens` are the new ones, an end token included; `text` leaves that out.

    `finish_reason` is "stop" (an end token or a stop string) or "length". `stats` are those of the whole batch.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats


class Engine:
    """A loaded model that generates text. Made by `load`."""

    def __init__(self, tokens: TokenEngine, tokenizer: Tokenizer, ends: Sequence[int]):
        self.tokens, self.tokenizer, self.ends = tokens, tokenizer, tuple(ends)

    @property
    def stats(self) -> Stats:
        """Of the last generation."""
        return self.tokens.last_stats

    @overload
    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = ...,
        sampling: SamplingConfig | None = ...,
        stop: Sequence[str] = ...,
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str],
        *,
        max_new_tokens: int = ...,
        sampling: SamplingConfig | None = ...,
        stop: Sequence[str] = ...,
    ) -> list[Generation]: ...
    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingConfig | None = None,
        stop: Sequence[str] = (),
    ) -> Generation | list[Generation]:
        """One prompt in, one `Generation` out; a list in (up to 8, decoded together), a list out.

        Greedy unless `sampling` says otherwise. Raises `PromptError` or `ResidencyError`.
        """
        single = isinstance(prompt, str)
        run = _Run(self, [prompt] if isinstance(prompt, str) else list(prompt), max_new_tokens, sampling, stop)
        for _ in run:
            pass
        return run.results()[0] if single else run.results()

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingConfig | None = None,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """The same text as `generate`, in pieces as they are decided."""
        for _, piece in _Run(self, [prompt], max_new_tokens, sampling, stop):
            if piece:
                yield piece


class _Run:
    """One generation: iterates over (sequence, new text) and then has the results."""

    def __init__(
        self,
        engine: Engine,
        prompts: list[str],
        max_new_tokens: int,
        sampling: SamplingConfig | None,
        stop: Sequence[str],
    ):
        if isinstance(stop, str) or not all(isinstance(item, str) and item for item in stop):
            raise PromptError(f"stop must be a list of non-empty strings, got {stop!r}")
        self.engine = engine
        encoded = [encode_prompt(engine.tokenizer, prompt, index) for index, prompt in enumerate(prompts)]
        self.streams = [TextStream(tokenizer=engine.tokenizer, stop=tuple(stop)) for _ in prompts]
        self.new: list[list[int]] = [[] for _ in prompts]
        self.reasons = ["length"] * len(prompts)
        self.open = set(range(len(prompts)))
        self.events = engine.tokens.run(
            encoded, max_new_tokens=max_new_tokens, sampling=sampling, end_tokens=engine.ends
        )

    def __iter__(self) -> Iterator[tuple[int, str]]:
        try:
            for event in self.events:
                if event.sequence in self.open:
                    yield event.sequence, self._take(event)
                if not self.open:
                    return
            for index in sorted(self.open):
                yield index, self.streams[index].close()
        finally:
            self.events.close()  # type: ignore[attr-defined]

    def _take(self, event: TokenEvent) -> str:
        index, stream = event.sequence, self.streams[event.sequence]
        self.new[index].append(event.token)
        if event.end == STOPPED:
            self._finish(index)
            return stream.close()
        piece = stream.push(event.token)
        if stream.finished:
            self._finish(index)
        return piece

    def _finish(self, index: int) -> None:
        self.reasons[index] = "stop"
        self.open.discard(index)

    def results(self) -> list[Generation]:
        return [
            Generation(text=stream.text, tokens=tokens, finish_reason=reason, stats=self.engine.stats)
            for stream, tokens, reason in zip(self.streams, self.new, self.reasons, strict=True)
        ]


def load(
    model: str | Path = "demo",
    *,
    residency: Residency | None = None,
    device_memory: str | int | None = None,
    policy: Policy | str = "seqmoe",
    max_batch: int = 1,
    context: int | None = None,
    dtype: str | None = None,
    random_weights: bool = False,
    kernels: Implementation | None = None,
    progress: bool | None = None,
) -> Engine:
    """A model into memory: dense weights and a slot cache on the device, all experts in pinned host memory.

    Args:
      model: a directory, a Hugging Face id, `"demo"`, or (with `random_weights`) the name of a preset in `configs/`.
      residency: share of the experts that have a slot, in (0, 1], or `"least"`. Default: as many as fit.
      device_memory: instead of a residency, a budget for weights, slots, KV and workspace: `"12GiB"` or bytes.
      policy: which expert leaves when a missing one needs its slot; see `seqmoe_jax.experts.policy`.
      max_batch: most sequences decoded together, 1 to 8. Each adds K experts to the least number of slots.
      context: longest prompt + new tokens; memory is planned for it. Default: 4096, or what the model was made for
        if that is less.
      dtype: of activations, "float32" or "bfloat16". Default: float32 on a CPU, the checkpoint's dtype elsewhere.
      kernels: "xla", "gpu" or "tpu". Default: the best that this backend has (`seqmoe doctor` shows it).
      progress: bars and messages on standard error. Default: if that is a terminal.

    Raises `CheckpointError`, `ConfigError` or `ResidencyError`, each in one line that says what to do.
    """
    enable_compilation_cache()
    shown = sys.stderr.isatty() if progress is None else progress
    tokenizer: Tokenizer
    ends: tuple[int, ...]
    with _LoadBar(shown, str(model)) as bar:
        if random_weights:
            loaded = random_model(preset_path(str(model)), dtype=dtype, name=str(model), progress=bar)
            tokenizer, ends = ByteTokenizer(vocab=loaded.spec.vocab), ()
        else:
            loaded, directory = load_model(model, dtype=dtype, progress=bar)
            tokenizer, ends = FileTokenizer(directory), end_tokens(directory)
    engine = TokenEngine(
        loaded,
        residency=residency,
        device_memory=None if device_memory is None else parse_bytes(device_memory),
        policy=policy,
        max_batch=max_batch,
        context=context,
        implementation=kernels,
        **({"announce": _say} if shown else {}),
    )
    return Engine(engine, tokenizer, ends)


@overload
def generate(model: str | Path, prompt: str, **options: Any) -> Generation: ...
@overload
def generate(model: str | Path, prompt: Sequence[str], **options: Any) -> list[Generation]: ...
def generate(
    model: str | Path,
    prompt: str | Sequence[str],
    *,
    max_new_tokens: int = 128,
    stop: Sequence[str] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> Generation | list[Generation]:
    """Loads a model, generates once, and lets go of it. `options` are those of `load`.

    >>> generate("demo", "def fibonacci(n):", max_new_tokens=64, residency=0.45).text  # doctest: +SKIP
    """
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    count = 1 if isinstance(prompt, str) else max(1, len(prompt))
    engine = load(model, max_batch=options.pop("max_batch", count), **options)
    return engine.generate(prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop)


class _LoadBar:
    """A progress bar over bytes read, shown for what takes longer than a second."""

    def __init__(self, shown: bool, name: str):
        self._shown, self._name = shown, name
        self._bar: Any = None

    def __enter__(self) -> Callable[[int, int], None] | None:
        return self._update if self._shown else None

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _update(self, done: int, total: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            label = f"loading {self._name}"
            self._bar = tqdm(
                total=total, desc=label, unit="B", unit_scale=True, delay=1.0, leave=False, file=sys.stderr
            )
        self._bar.update(done - self._bar.n)


def _say(message: str) -> None:
    print(f"seqmoe: {message} (once; kept in the compilation cache)", file=sys.stderr)
