"""Recording a trace: a model generates from prompts, then reads its own text again and says where it was routed.

Two passes (paper 5.1): tokens come from batched decoding, the routing of all of them from prefill, which takes many
tokens at once and routes them as decoding did. Prompts are done in groups; each finished group is a file beside the
trace, so that a killed run goes on where it was, and no more than a group's routing is held until the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32, Integer, UInt8

from seqmoe_jax.errors import NonFiniteError, PromptError
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.outputs.files import check_file
from seqmoe_jax.outputs.parts import check_parts, parts_of
from seqmoe_jax.outputs.runs import Run, check_replaced, is_of, to_json
from seqmoe_jax.progress import shows_progress
from seqmoe_jax.traces.format import Trace, join, read_run, read_trace, write_trace
from seqmoe_jax.traces.prompts import Prompt

if TYPE_CHECKING:  # the engine is handed in: traces are below it
    from seqmoe_jax.api import Engine
    from seqmoe_jax.engine import TokenEngine

GROUP = 64  # prompts per file of a run that is not finished


@dataclass(frozen=True, kw_only=True)
class Recording:
    """How sequences are generated: at most `max_new_tokens` after each prompt, up to one of `eos_token_ids`.

    Sequence i draws with `sampling.seed` + i; a prompt's own temperature goes before that of `sampling`.
    """

    max_new_tokens: int = 256
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise PromptError(
                f"max_new_tokens must be at least 2, got {self.max_new_tokens}: the first new token comes from the "
                "prompt, so a sequence of one has no decode step"
            )


def record(
    engine: TokenEngine,
    prompts: Sequence[Prompt],
    encoded: Sequence[list[int]],
    config: Recording,
    out: str | os.PathLike[str],
    *,
    model: str,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, steps: None,
) -> Trace:
    """Records the prompts and writes the trace to `out`; goes on from what an earlier run of the same left beside it.

    `encoded` holds the prompts' tokens; `model` is the name that the trace carries. A prompt whose continuation ends
    at its first token has no decode step and is left out. A trace of the same run that is there already is returned;
    anything else is replaced with `force` alone. Raises `PromptError` where a prompt is too long, or where nothing is
    left, and `OutputError`.
    """
    out = Path(out)
    for index, tokens in enumerate(encoded):  # before hours of work, not after
        if len(tokens) + config.max_new_tokens > engine.context:
            raise PromptError(
                f"prompt {index} has {len(tokens)} tokens and {config.max_new_tokens} new ones were asked for, but the "
                f"context is {engine.context}; shorten it, ask for fewer, or load with a longer context"
            )
    run = _run(engine, prompts, encoded, config, model)
    check_output(out, run, needed=_least_bytes(engine, encoded), force=force)
    with parts_of(out, run, force=force) as parts:
        if is_of(read_run(out), run):
            return read_trace(out)
        steps = 0
        for first in range(0, len(prompts), GROUP):
            group = slice(first, min(first + GROUP, len(prompts)))
            path = parts / f"{first:06d}.npz"
            if path.exists():
                steps += int(read_trace(path).decoded().sum())
            else:
                trace = _group(engine, prompts[group], encoded[group], first, config, run)
                if trace is not None:
                    write_trace(path, trace)
                    steps += int(trace.decoded().sum())
            progress(group.stop, steps)
        files = sorted(parts.glob("*.npz"))
        if not files:
            raise PromptError("every continuation ended at its first token: there is no decode step to record")
        trace = join([read_trace(path) for path in files])
        write_trace(out, trace, beside=parts)
    return trace


def record_prompts(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    out: str | os.PathLike[str] | None = None,
    *,
    max_new_tokens: int = 256,
    splits: Sequence[str] | None = None,
    sampling: SamplingConfig | None = None,
    model: str | None = None,
    force: bool = False,
    progress: bool | None = None,
) -> Trace:
    """The routing of an engine's model on prompts and on what it makes of them.

    Args:
      prompts: texts or token ids.
      out: a file to write it to; a run that is killed goes on from what is beside it. None: it is in memory alone.
      max_new_tokens: after each prompt, at least 2, up to one of the engine's end tokens.
      splits: one for each prompt, such as "train" and "test".
      sampling: how tokens are drawn. Default: greedy.
      model: the name that the trace carries, by which predictors are found. Default: the engine's.
      progress: a bar. Default: in a terminal or a notebook.

    Raises `PromptError`, `OutputError` and what `Engine.generate` does.
    """
    if isinstance(prompts, str) or not prompts:
        raise PromptError("expected a list of prompts to record, got " + ("text" if prompts else "none"))
    if splits is not None and len(splits) != len(prompts):
        raise PromptError(f"expected a split for each of {len(prompts)} prompts, got {len(splits)}")
    encoded = [engine.request(prompt, max_new_tokens=1, index=index).tokens for index, prompt in enumerate(prompts)]
    each = [
        Prompt(text=prompt if isinstance(prompt, str) else "", split=None if splits is None else splits[index])
        for index, prompt in enumerate(prompts)
    ]
    recording = Recording(
        max_new_tokens=max_new_tokens, sampling=sampling or SamplingConfig(), eos_token_ids=engine.eos_token_ids
    )
    with ExitStack() as stack:
        if out is None:
            out = Path(stack.enter_context(TemporaryDirectory())) / "trace.npz"
        bar = stack.enter_context(progress_bar(len(prompts), shows_progress(progress)))
        name = model or engine.name
        return record(engine.token_engine, each, encoded, recording, out, model=name, force=force, progress=bar)


@contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows how many of the prompts are done."""
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="prompt", disable=not shown, leave=False) as bar:

        def progress(done: int, steps: int) -> None:
            bar.update(done - bar.n)
            bar.set_postfix_str(f"{steps} steps")

        yield progress


def check_output(out: Path, run: Run | None = None, *, needed: int = 0, force: bool) -> None:
    """Raises `OutputError` where no trace can be recorded to, of a known `run` or, while that is not known, of any."""
    check_file(out, needed=needed)
    check_parts(out)
    check_replaced(out, "trace", read_run, run, force=force)


def _group(
    engine: TokenEngine,
    prompts: Sequence[Prompt],
    encoded: Sequence[list[int]],
    first: int,
    config: Recording,
    run: Run,
) -> Trace | None:
    """The trace of some prompts, of which `first` is the index of the first; None where none has a decode step."""
    new: list[list[int]] = [[] for _ in prompts]
    for batch, sampling in _batches(engine.max_batch, prompts, encoded, first, config):
        events = engine.run(
            [encoded[i] for i in batch],
            max_new_tokens=config.max_new_tokens,
            sampling=sampling,
            eos_token_ids=config.eos_token_ids,
        )
        for event in events:
            if not event.finite:
                raise NonFiniteError(
                    f"prompt {first + batch[event.sequence]}: expected finite logits, got NaN or infinity; "
                    "check the model's files, or load with dtype='float32'"
                )
            new[batch[event.sequence]].append(event.token)
    # The last token is never processed.
    processed = [prompt + tokens[:-1] for prompt, tokens in zip(encoded, new, strict=True)]
    kept = [i for i, tokens in enumerate(new) if len(tokens) > 1]
    if not kept:
        return None
    routing: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    by_length = sorted(kept, key=lambda i: len(processed[i]))
    for at in range(0, len(by_length), engine.max_batch):
        batch = by_length[at : at + engine.max_batch]
        routing |= dict(zip(batch, engine.routing([processed[i] for i in batch]), strict=True))
    spec = engine.model.spec
    stored = [stored_routing(*routing[i], spec.moe.num_experts) for i in kept]
    lens = np.array([len(processed[i]) for i in kept], np.int64)
    splits = [prompts[i].split for i in kept]
    return Trace(
        ids=np.concatenate([ids for ids, _ in stored]),
        probs_u8=np.concatenate([probs for _, probs in stored]),
        tok=np.concatenate([np.array(processed[i], np.int32) for i in kept]),
        lens=lens,
        seq_offsets=np.concatenate([[0], np.cumsum(lens)]),
        num_experts=spec.moe.num_experts,
        layer_index=np.array(spec.moe_layers),
        vocab_size=spec.vocab,
        split=None if None in splits else np.array(splits),
        prefill_lens=np.array([len(encoded[i]) for i in kept], np.int64),
        metadata={
            "model": np.array(run["model"]),
            "run": np.array(to_json(run)),
            "prompt_index": np.array([first + i for i in kept]),
            "temperature": np.array([temperature_of(prompts[i], config) for i in kept], np.float32),
        },
    )


def _batches(
    size: int, prompts: Sequence[Prompt], encoded: Sequence[list[int]], first: int, config: Recording
) -> Iterator[tuple[list[int], SamplingConfig]]:
    """Indices of prompts that are decoded together: of one temperature and of like lengths."""
    temperatures = [temperature_of(prompt, config) for prompt in prompts]
    begun = 0
    for temperature in sorted(set(temperatures)):
        chosen = [i for i, other in enumerate(temperatures) if other == temperature]
        chosen.sort(key=lambda i: len(encoded[i]))
        for at in range(0, len(chosen), size):
            batch = chosen[at : at + size]
            # The engine's rows draw with this seed and the ones after it: every sequence has its own.
            seed = (config.sampling.seed + first + begun) % 2**32
            yield batch, dataclasses.replace(config.sampling, temperature=temperature, seed=seed)
            begun += len(batch)


def temperature_of(prompt: Prompt, config: Recording) -> float:
    return config.sampling.temperature if prompt.temperature is None else float(prompt.temperature)


def stored_routing(
    ids: Integer[np.ndarray, "T L K"], weights: Float32[np.ndarray, "T L K"], experts: int
) -> tuple[Integer[np.ndarray, "T L K"], UInt8[np.ndarray, "T L K"]]:
    """A trace's `ids`, heaviest first, and `probs_u8`: the weights as shares of their sum, which for a softmax router
    is the softmax over the K selected."""
    order = np.argsort(-weights, axis=2, kind="stable")
    weights = np.take_along_axis(weights, order, axis=2)
    share = weights / weights.sum(axis=2, keepdims=True)
    small = np.uint8 if experts <= 256 else np.uint16
    return np.take_along_axis(ids, order, axis=2).astype(small), np.round(255 * share).astype(np.uint8)


def _least_bytes(engine: TokenEngine, encoded: Sequence[list[int]]) -> int:
    """The least room for the parts and the trace made of them: that of the prompts' steps, were they not compressed.

    Compression about halves it, but then it is there twice; what is generated comes on top.
    """
    moe = engine.model.spec.moe
    per_step = len(engine.model.spec.moe_layers) * moe.top_k * (2 if moe.num_experts <= 256 else 3)
    return per_step * sum(map(len, encoded))


def _run(
    engine: TokenEngine, prompts: Sequence[Prompt], encoded: Sequence[list[int]], config: Recording, model: str
) -> Run:
    """All that a trace depends on."""
    # Weights of another training are another model, whatever its directory is called.
    norm = hashlib.sha256(np.asarray(engine.model.weights.norm).tobytes())
    norm.update(repr(engine.model.spec).encode())
    said = [[ids, prompt.split, prompt.temperature] for ids, prompt in zip(encoded, prompts, strict=True)]
    return {
        "model": model,
        "weights": norm.hexdigest(),
        "dtype": str(engine.dtype),
        "batch": engine.max_batch,
        "prompts": hashlib.sha256(json.dumps(said).encode()).hexdigest(),
        **dataclasses.asdict(config),
        "group": GROUP,
    }
