"""`seqmoe learn`: a predictor of one's own, from prompts to where `auto` finds it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqmoe_jax.cli import predictor, trace
from seqmoe_jax.cli.arguments import (
    above_zero,
    add_force,
    add_json,
    generate_options,
    load_engine,
    progress_of,
    run_of,
    share,
)
from seqmoe_jax.errors import ConfigError, OutputError, PromptError

if TYPE_CHECKING:
    from seqmoe_jax.models.spec import ModelSpec
    from seqmoe_jax.simulation.worth import Worth
    from seqmoe_jax.traces.format import Trace
    from seqmoe_jax.traces.prompts import Prompt

HELD_OUT = 10  # of so many prompts one, where the file does not say which are held out
# What is trained on a CPU where the arguments do not say: as the demo model's predictor, in minutes.
ON_CPU = {"width": 160, "token_width": 64, "refine_width": 160, "echo": 128, "window": 256, "updates": 450}
LEAST = 3  # prompts: one to learn from, one to stop at, one to judge by


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trace.add_recording_arguments(parser)
    said = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in ON_CPU.items())
    training = parser.add_argument_group("training", description=f"On a CPU the defaults are {said}.")
    predictor.add_training_arguments(training, batch="--training-batch")
    parser.set_defaults(**dict.fromkeys(ON_CPU))
    judged = parser.add_argument_group("whether it pays")
    judged.add_argument("--simulated-residency", type=share, nargs="+", default=[0.45, 0.25], metavar="R",
        help="shares of the experts that have a slot (default: 0.45 0.25)")  # fmt: skip
    judged.add_argument("--transfer-cost", type=above_zero, nargs="+", default=[0.72, 3.0], metavar="RHO",
        help="time to move an expert / compute time of a layer (default: 0.72 3)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="gets the trace, the predictor and what was found, and "
        "has what is done until then (default: learning/ in the cache directory)")  # fmt: skip
    add_force(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Traces, trains, evaluates, judges and installs; goes on where an earlier run of the same was killed."""
    from seqmoe_jax.compilation import enable_compilation_cache
    from seqmoe_jax.forecast import store
    from seqmoe_jax.outputs.directories import make_directory
    from seqmoe_jax.outputs.files import check_directory_takes, write_text
    from seqmoe_jax.outputs.runs import to_json
    from seqmoe_jax.simulation.worth import pays
    from seqmoe_jax.traces.prompts import read_prompts

    generate_options(args)  # faults in them
    prompts, held = with_splits(read_prompts(args.prompts), args.prompts)
    model = trace.model_name(args)
    home = store.installed(model)
    said = run_of(args, prompts=digest(prompts), restart=False)
    if (done := _installed(home, said, force=args.force)) is not None:
        return _report(args, done, home)
    out = args.out or home.parents[1] / "learning" / home.name
    make_directory(out)
    check_directory_takes(out, out, 0)
    enable_compilation_cache()
    log, seconds = predictor.logger(args), {}

    @contextlib.contextmanager
    def timed(part: str) -> Iterator[None]:
        log(f"{part} ...")
        begun = time.perf_counter()
        yield
        seconds[part] = round(time.perf_counter() - begun, 1)

    with timed("trace"):
        recorded = _trace(args, prompts, out)
    if not {"train", held} <= set(() if recorded.split is None else recorded.split):
        raise PromptError(f"{args.prompts}: every answer of a split ended at its first token: give more prompts")
    with timed("train"):
        evaluation = _train(args, recorded, out / "predictor", model)
    with timed("judge"):
        rows = _judge(args, recorded.select(held), out)
    found = {
        "run": said,
        "model": model,
        "prompts": len(prompts),
        "steps": {split: int(recorded.select(split).decoded().sum()) for split in ("train", held)},
        "recall": {name: row["recall_at"] for name, row in evaluation[held].items()},
        "simulated": [dataclasses.asdict(row) for row in rows],
        "pays": pays(rows),
        "seconds": seconds,
    }
    write_text(out / "predictor" / store.LEARNED, to_json(found) + "\n")
    if found["pays"]:
        store.install(out / "predictor", model)
    return _report(args, found, home if found["pays"] else out / "predictor")


def with_splits(prompts: Sequence[Prompt], name: str) -> tuple[list[Prompt], str]:
    """The prompts, every one of a split, and the split that is held out. Raises `PromptError`."""
    if len(prompts) < LEAST:
        raise PromptError(
            f"{name}: expected at least {LEAST} prompts to learn from, and better hundreds, got {len(prompts)}"
        )
    if prompts[0].split is None:
        chosen = [dataclasses.replace(prompt, split="train") for prompt in prompts]
        chosen[::HELD_OUT] = [dataclasses.replace(prompt, split="test") for prompt in prompts[::HELD_OUT]]
        return chosen, "test"
    counts = {split: sum(prompt.split == split for prompt in prompts) for split in {str(p.split) for p in prompts}}
    others = sorted(set(counts) - {"train"})
    if counts.get("train", 0) < 2 or not others:
        there = ", ".join(f"{count} of {split!r}" for split, count in sorted(counts.items()))
        raise PromptError(
            f"{name}: expected two prompts or more of split 'train' and one of another that is held out, got {there}; "
            "without any 'split' a tenth is held out"
        )
    return list(prompts), "test" if "test" in others else others[0]


def digest(prompts: Sequence[Prompt]) -> str:
    return hashlib.sha256(json.dumps([dataclasses.asdict(prompt) for prompt in prompts]).encode()).hexdigest()


def _installed(home: Path, said: Mapping[str, Any], *, force: bool) -> dict[str, Any] | None:
    """What an earlier run of the same found. Raises `OutputError` where something else is installed."""
    from seqmoe_jax.forecast import store
    from seqmoe_jax.inputs import read_json
    from seqmoe_jax.outputs.directories import check_directory
    from seqmoe_jax.outputs.runs import differences

    if not home.exists():
        return None
    check_directory(home, mine=store.FILES)
    try:
        found = read_json(home / store.LEARNED)
        different = differences(found["run"], said) or _incomplete(found)
    except (ConfigError, KeyError, TypeError, AttributeError, ArithmeticError):
        found, different = {}, "it does not say which"
    if different and not force:
        raise OutputError(f"{home} has a predictor already, of another run ({different}): --force replaces it")
    return None if different else found


def _incomplete(found: Mapping[str, Any]) -> str:
    """What is wrong with what an earlier run is said to have found; raises `KeyError` or `TypeError` for some of it."""
    from seqmoe_jax.simulation.worth import Worth, pays

    rows = [Worth(**row) for row in found["simulated"]]
    recalls = all(isinstance(value, float) for row in found["recall"].values() for value in row.values())
    return "" if recalls and found["pays"] == pays(rows) and found["model"] else "its file is damaged"


def _trace(args: argparse.Namespace, prompts: Sequence[Prompt], out: Path) -> Trace:
    """The trace of the prompts; the model is let go after it."""
    engine = load_engine(args, max_batch=args.batch, predictor="none", progress=progress_of(args))
    _check_room(args, engine.token_engine.model.spec, out)
    recorded = trace.recorded(engine, args, prompts, out / "trace.npz")
    del engine
    gc.collect()
    return recorded


def _train(args: argparse.Namespace, recorded: Trace, out: Path, model: str) -> dict[str, Mapping[str, Any]]:
    """Trains, unless that is done; the rows of the recall table of each split."""
    from seqmoe_jax.research.predictors import train_predictor

    shown = sys.stderr.isatty() and not args.json
    options = training_options(args) | {"model": model, "progress": shown, "log": predictor.logger(args)}
    trained = train_predictor(recorded, out, **options)
    return {name: evaluation.rows for name, evaluation in trained.evaluations.items()}


def training_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `train_predictor` that the arguments, or this backend, choose; the others are at its defaults."""
    import jax

    given = {name: getattr(args, name) for name in predictor.TRAINING if getattr(args, name, None) is not None}
    given |= {"batch": args.training_batch, "model": None}
    return (ON_CPU if jax.default_backend() == "cpu" else {}) | given


def _check_room(args: argparse.Namespace, spec: ModelSpec, out: Path) -> None:
    """Raises `OutputError` now, not after the trace, where the disk has no room for the checkpoints of training."""
    from seqmoe_jax.forecast.config import PredictorConfig
    from seqmoe_jax.forecast.training.config import TrainConfig
    from seqmoe_jax.forecast.training.pipeline import needed_bytes
    from seqmoe_jax.outputs.files import check_directory_takes

    options = training_options(args)
    names = {"width": "d_model", **{name: name for name in ("blocks", "token_width", "refine_width", "echo")}}
    sizes = {field: options[name] for name, field in names.items() if name in options}
    shape = {"layers": len(spec.moe_layers), "experts": spec.moe.num_experts, "active": spec.moe.top_k}
    config = PredictorConfig(model="", **shape, inputs=args.inputs, **sizes)
    check_directory_takes(out, out, needed_bytes(config, TrainConfig()))


def _judge(args: argparse.Namespace, held: Trace, out: Path) -> list[Worth]:
    """What the predictor is worth; every simulation that is done is kept."""
    from tqdm import tqdm

    from seqmoe_jax.forecast import store
    from seqmoe_jax.forecast.evaluation.export import forecasts_of
    from seqmoe_jax.outputs.files import write_text
    from seqmoe_jax.simulation.worth import find_worth, settings

    residencies, costs = args.simulated_residency, args.transfer_cost
    path, of = out / "simulated.json", {"trace": held.digest, "predictor": store.read_run(out / "predictor")}
    total = len(settings(residencies, costs, 0))
    with tqdm(total=total, unit="simulation", disable=args.json or not sys.stderr.isatty(), leave=False) as bar:

        def found(rows: list[Worth]) -> None:
            bar.update(len(rows) - bar.n)
            write_text(path, json.dumps(of | {"rows": [dataclasses.asdict(row) for row in rows]}) + "\n")

        return find_worth(
            held,
            lambda: forecasts_of(*store.load(out / "predictor"), held, rollout=0),
            residencies,
            costs,
            known=_known(path, of),
            found=found,
        )


def _known(path: Path, of: Mapping[str, Any]) -> list[Worth]:
    """The simulations of this trace and predictor that were done before."""
    from seqmoe_jax.inputs import read_json
    from seqmoe_jax.simulation.worth import Worth

    try:
        there = read_json(path)
        return [Worth(**row) for row in there["rows"]] if all(there.get(name) == of[name] for name in of) else []
    except (ConfigError, KeyError, TypeError):
        return []


def _report(args: argparse.Namespace, found: Mapping[str, Any], where: Path) -> int:
    from seqmoe_jax.simulation.worth import Worth, table

    if args.json:
        print(json.dumps({**found, "installed": str(where) if found["pays"] else None}))
        return 0
    for name, recall in found["recall"].items():
        print(f"{'recall of ' + name:32}" + "  ".join(f"top {top} {value:.3f}" for top, value in recall.items()))
    print(table([Worth(**row) for row in found["simulated"]]))
    if found["pays"]:
        print(f"it pays: {where} is what --predictor auto finds for {found['model']}")
    else:
        print(f"it does not pay everywhere and is not installed; --predictor {where} takes it all the same")
    return 0
