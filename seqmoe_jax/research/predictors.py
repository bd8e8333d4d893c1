"""`evaluate` and `train_predictor`: how well routing can be forecast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from seqmoe_jax.display import preformatted
from seqmoe_jax.errors import TraceError
from seqmoe_jax.fields import Fields
from seqmoe_jax.forecast import store
from seqmoe_jax.forecast.data import divide
from seqmoe_jax.forecast.evaluation.evaluate import Row, recall_rows, table
from seqmoe_jax.forecast.training import pipeline
from seqmoe_jax.forecast.training.config import TrainConfig
from seqmoe_jax.progress import shows_progress
from seqmoe_jax.traces.format import Trace

Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Recall of the routed experts among the likeliest K to K + 4 of a forecast, for a predictor and the baselines.

    `rows[name]`: `recall_at` by how many are looked at, `per_layer` (at K + 3), `short` and `long` sequences, `rollout`
    by steps ahead, `refined` in mid-step, and `steps`; shares from 0 to 1.
    """

    rows: Mapping[str, Row]
    split: str | None = None

    def __str__(self) -> str:
        return table(self.rows)

    def __repr__(self) -> str:
        best = {name: max(row["recall_at"].values()) for name, row in self.rows.items()}
        listed = ", ".join(f"{name} {recall:.3f}" for name, recall in best.items())
        return f"Evaluation({self.split or 'all'}: {listed})"

    def _repr_html_(self) -> str:
        return preformatted(f"Recall on {self.split or 'all sequences'}", str(self))


@dataclass(frozen=True, kw_only=True)
class Training:
    """A trained predictor: the directory that `load(predictor=...)` takes, and its evaluation by split.

    `report` is what stands beside it in a file: `updates` of each run, `cost` of a step, `splits`.
    """

    directory: Path
    report: Mapping[str, Any]

    @property
    def evaluations(self) -> dict[str, Evaluation]:
        splits = self.report["splits"]
        return {name: Evaluation(rows=said["predictors"], split=name) for name, said in splits.items()}

    def __str__(self) -> str:
        return "\n".join(f"{name}\n{evaluation}" for name, evaluation in self.evaluations.items())

    def __repr__(self) -> str:
        return f"Training({self.directory}: {', '.join(map(repr, self.evaluations.values()))})"

    def _repr_html_(self) -> str:
        return preformatted(str(self.directory), str(self))


def evaluate(
    trace: Trace,
    predictor: str | Path = "none",
    *,
    split: str = "test",
    model: str | None = None,
    trigger: int | None = None,
    log: Log = lambda line: None,
) -> Evaluation:
    """How much of the coming step's routing forecasts find, beside statistics of split train.

    Args:
      predictor: a directory, "auto" (the one that ships for the trace's model), or "none": the baselines alone.
      split: sequences to evaluate on; a trace without splits is divided, a tenth of it is evaluated on.
      model: the model that the trace is of. Default: what the trace says.
      trigger: layer of the mid-step refinement. Default: L/2.

    Raises `TraceError`, `PredictorError`.
    """
    _check_trace(trace)
    found = None
    if str(predictor) != "none":
        found = store.load(store.require_predictor(predictor, model or trace.model, **trace.sizes))
    fitted, held = divide(trace) if trace.split is None else (trace.select("train"), trace.select(split))
    rows = recall_rows(fitted, held, found, trigger=trigger, log=log)
    return Evaluation(rows=rows, split=split if trace.split is not None else None)


def train_predictor(
    trace: Trace,
    out: str | Path,
    *,
    model: str | None = None,
    inputs: Literal["activations", "activations+token"] | str = "activations+token",
    width: int = 640,
    blocks: int = 2,
    token_width: int = 96,
    refine_width: int = 768,
    echo: int = 512,
    updates: int = 600,
    batch: int = 16,
    window: int = 512,
    learning_rate: float = 2e-3,
    sampled_updates: int | None = None,
    teachers: int = 0,
    stop_at: float | None = None,
    seed: int = 0,
    restart: bool = False,
    force: bool = False,
    progress: bool | None = None,
    log: Log = lambda line: None,
) -> Training:
    """Trains a Mamba2 predictor on split train of a trace, evaluates it on the others, and stores it in `out`.

    A run that was killed goes on from its checkpoints, beside `out`; one that is done already is returned at once.

    Args:
      out: a directory, which `load(predictor=out)` takes.
      model: what the predictor is for. Default: what the trace says.
      inputs: "activations" is the paper's; with "+token" it knows the token that was just sampled, too.
      width, blocks, token_width, refine_width: of the Mamba2 blocks, of the token's embedding, of the refinement.
      echo: steps that are searched for an earlier use of a token.
      updates, batch, window, learning_rate: of the training; `window` is in steps, early stopping may end it before.
      sampled_updates: of scheduled sampling after it. Default: 0.4 of the updates.
      teachers: predictors of other seeds that are trained first, from which it learns too.
      stop_at: train on all of split train and end after this share of the updates. Default: hold out a tenth.
      restart, force: do not go on from checkpoints; replace what is at `out`.
      progress: bars. Default: in a terminal or a notebook.

    Raises `TraceError`, `PredictorError`, `ConfigError` or `OutputError`.
    """
    _check_trace(trace)
    _check_numbers(locals())
    shown = shows_progress(progress)

    @contextlib.contextmanager
    def bar(name: str) -> Iterator[Callable[[int, int], None]]:
        from tqdm.auto import tqdm

        with tqdm(unit="update", disable=not shown, leave=False, desc=name) as drawn:

            def advance(done: int, updates: int) -> None:
                drawn.total = updates
                drawn.update(done - drawn.n)

            yield advance

    report = pipeline.train_predictor(
        trace,
        Path(out),
        model=model or trace.model or "unnamed",
        inputs=inputs,
        sizes=dict(d_model=width, blocks=blocks, token_width=token_width, echo=echo, refine_width=refine_width),
        training=TrainConfig(
            updates=updates, batch=batch, window=window, learning_rate=learning_rate,
            bfloat16=jax.default_backend() != "cpu",
        ),
        seed=seed,
        sampled_updates=sampled_updates,
        teachers=teachers,
        stop_at=stop_at,
        restart=restart,
        force=force,
        log=log,
        progress=bar,
    )  # fmt: skip
    return Training(directory=Path(out), report=report)


def _check_trace(trace: Trace) -> None:
    if not isinstance(trace, Trace):
        raise TraceError(f"expected a Trace, got {type(trace).__name__}; a file is read by Trace.load")


def _check_numbers(given: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for what is no number, or out of range."""
    said = Fields(given, "train_predictor")
    for name in ("width", "blocks", "token_width", "refine_width", "updates", "batch"):
        said.size(name)
    said.integer("window", least=32, most=1 << 20)
    for name in ("echo", "teachers", "seed"):
        said.count(name)
    said.count("sampled_updates", None)
    said.number("learning_rate", least=1e-9, most=1)
    said.number("stop_at", None, least=1e-9, most=1)
