"""Trains, evaluates and writes the predictors of one trace within a time limit: sweep, seeds, distillation, controls.

    python -m scripts.train_predictors TRACE.npz --out DIR [--minutes 6] [--smoke]

Tuning looks at a tenth of the split `train`; final runs use all of `train`; `test*` splits are only evaluated.
Every training's result goes to DIR/results.json as soon as it exists, every line to DIR/log.txt. All trainings share
one compiled update: inputs that a variant goes without are blanked in its data.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
    from flax import nnx  # noqa: F401
except Exception as error:
    sys.exit(f"flax.nnx does not import with jax {jax.__version__} ({error}); install flax >= 0.12.12")

from seqmoe_jax.forecast import inference as plain
from seqmoe_jax.forecast import store
from seqmoe_jax.forecast.by_rows import by_rows
from seqmoe_jax.forecast.config import PredictorConfig, Retention
from seqmoe_jax.forecast.data import Steps, divide, prepare, shuffle_steps
from seqmoe_jax.forecast.evaluation.baselines import baselines
from seqmoe_jax.forecast.evaluation.evaluate import evaluate_baseline, evaluate_predictor, table
from seqmoe_jax.forecast.evaluation.metrics import validate
from seqmoe_jax.forecast.features import NO_TOKEN, activate, token_table
from seqmoe_jax.forecast.training.fit import Result, fit
from seqmoe_jax.forecast.training.train import Plan, Recipe, weights_of
from seqmoe_jax.forecast.training.variants import without_token
from seqmoe_jax.traces.format import Trace, read_trace

# One change at a time, kept where validation gains from it; the order is that of expected gain.
CHANGES: list[dict[str, float]] = [
    {"weight_decay": 2.0},
    {"updates": 1.5},
    {"layer": 0.15, "feature": 0.15},
    {"learning_rate": 1.5},
    {"dropout": 0.25},
    {"unseen": 0.2},
    {"echo": 0.25},
    {"ranking": 0.0},
    {"flatten": 0.0},
    {"membership": 1.0},
]
RELATIVE = ("updates", "learning_rate")


def changed(recipe: Recipe, change: dict[str, float]) -> Recipe:
    rates = {name: value for name, value in change.items() if name in recipe.rates._fields}
    other: dict[str, Any] = {name: value for name, value in change.items() if name not in rates}
    for name in RELATIVE:
        if name in other:
            other[name] = getattr(recipe, name) * other[name]
    return recipe._replace(rates=recipe.rates._replace(**rates), **other)


def blank(steps: Steps, *, token: bool, echo: bool) -> Steps:
    """The same steps without tokens or echoes."""
    return steps._replace(
        rows=steps.rows if token else jnp.full_like(steps.rows, NO_TOKEN),
        echo=steps.echo if echo else jnp.full_like(steps.echo, -1),
    )


class Session:
    """The time limit, the log, the results so far."""

    def __init__(self, out: Path, minutes: float, only: list[str]):
        self.only = only
        self.out, self.begun, self.limit = out, time.perf_counter(), 60 * minutes
        self.results: dict[str, Any] = {"predictors": {}, "runs": {}, "kept": {}, "errors": {}}
        out.mkdir(parents=True, exist_ok=True)
        self.file = (out / "log.txt").open("w")

    def spent(self) -> float:
        return time.perf_counter() - self.begun

    def log(self, line: str) -> None:
        line = f"[{self.spent():6.1f}] {line}"
        print(line, flush=True)
        print(line, file=self.file, flush=True)

    def write(self) -> None:
        partial = self.out / "results.json.partial"
        partial.write_text(json.dumps(self.results, indent=1))
        partial.replace(self.out / "results.json")

    def attempt(self, name: str, work: Callable[[], None], until: float = 0.93) -> bool:
        """Runs one part, if it is wanted and the time is not nearly up; a failure is recorded and the rest goes on."""
        if self.only and not name.startswith(tuple(self.only)):
            return False
        if self.spent() > until * self.limit:
            self.log(f"-- {name}: no time left")
            return False
        self.log(f"-- {name}")
        try:
            work()
        except Exception as error:
            self.log(traceback.format_exc())
            self.results["errors"][name] = repr(error)
        self.write()
        return name not in self.results["errors"]


@dataclasses.dataclass
class Trainer:
    """Data, sizes and the recipe that the parts share."""

    session: Session
    config: PredictorConfig
    plan: Plan
    tokens: np.ndarray
    data: dict[str, Steps]
    splits: list[str]
    recipe: Recipe
    stop_at: float | None  # share of its schedule after which a run without validation stops

    def train(
        self, name: str, steps: Steps, validation: Steps | None = None, *, stop: int | None = None, **options: Any
    ) -> Result:
        recipe = options.pop("recipe", self.recipe)
        if validation is None and self.stop_at is not None:
            stop = max(1, round(self.stop_at * recipe.updates))
        result = fit(
            self.config, self.plan, recipe, steps, validation, stop=stop,
            log=lambda line: self.session.log(f"{name}: {line}"), **options,
        )  # fmt: skip
        self.session.results["runs"][name] = {
            "recipe": jax.tree.map(float, recipe)._asdict() | {"rates": recipe.rates._asdict()},
            "score": result.score,
            "update": result.update,
            "seconds": round(result.seconds, 1),
            "history": result.history,
        }
        return result

    def judge(self, name: str, params: Any, *, token: bool = True, echo: bool = True, shuffled: bool = False) -> None:
        """Evaluates on every held-out split."""
        weights = weights_of(self.config, jax.tree.map(jnp.asarray, params))
        row: dict[str, Any] = {}
        for split in self.splits:
            steps = blank(self.data[split + "-shuffled" if shuffled else split], token=token, echo=echo)
            row[split] = evaluate_predictor(self.config, params, weights, steps, bfloat16=self.plan.bfloat16)
        self.session.results["predictors"][name] = row
        self.session.log(f"{name}:\n" + "\n".join(table({f"{split}": row[split]}) for split in row))

    def keep(self, stem: str, name: str, params: Any) -> None:
        """Writes the predictor of run `name` as files `stem`; a later one under the same stem replaces it."""
        weights = weights_of(self.config, jax.tree.map(jnp.asarray, params))
        config = self.config
        if stem == "activations":
            config, weights = without_token(config, weights)
        weights = jax.device_get(weights)
        for old in self.session.out.glob(f"{stem}-*.safetensors"):
            old.unlink()
        paths = store.save(self.session.out, config, weights, self.tokens if config.uses_token else None, stem=stem)
        self.session.results["kept"][stem] = name
        self.session.log(f"{stem}: " + ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in paths))


def measure(config: PredictorConfig, weights: dict[str, Any], tokens: np.ndarray) -> dict[str, float]:
    """Microseconds of one step, alone, with a refinement, and with a rollout of 8, bfloat16, one sequence."""
    weights = by_rows(jax.tree.map(lambda value: value.astype(jnp.bfloat16), weights))
    weights |= {"token_table": jnp.asarray(tokens)}
    count = 300 if jax.default_backend() != "cpu" else 3

    def loop(weights: Any, state: Any, features: Any, extra: str) -> Any:
        def body(index: Any, carry: Any) -> Any:
            state, features = carry
            # As in the decode step, the input is the routing of the step before, which depends on everything.
            state, following, retention = plain.one_step(config, weights, state, features, index[None] % 1000)
            mixed = following + 1e-6 * retention
            if extra == "rollout":
                mixed = mixed + plain.rollout(config, weights, state, 8)[0, 1:].sum(0)
            if extra == "refine":
                mixed = mixed + plain.refine(config, weights, state, features)[0]
            return state, activate(mixed, config.active).reshape(1, -1).astype(features.dtype)

        return jax.lax.fori_loop(0, count, body, (state, features))

    results = {}
    for extra in ("step", "refine", "rollout"):
        run = jax.jit(functools.partial(loop, extra=extra))
        state, features = plain.init_state(config, 1, jnp.bfloat16), jnp.zeros((1, config.keys), jnp.bfloat16)
        jax.block_until_ready(run(weights, state, features))
        begun = time.perf_counter()
        jax.block_until_ready(run(weights, state, features))
        results[extra] = round(1e6 * (time.perf_counter() - begun) / count, 1)
    return results


def load_data(trace: Trace, args: argparse.Namespace, session: Session) -> Trainer:
    whole = trace.select("train")
    splits = ["test", "test_ood"]
    held = {split: trace.select(split) for split in splits}
    if args.smoke:
        whole = whole.take(np.argsort(whole.lens, kind="stable")[:12])
        held = {split: part.take(np.argsort(part.lens, kind="stable")[:2]) for split, part in held.items()}
    vocabulary = int(trace.vocab_size or trace.tok.max() + 1)
    tokens = token_table(whole.tok, vocabulary)
    sizes: dict[str, Any] = {"width": 640, "token_width": 96, "refine_width": 768}
    if args.smoke:
        sizes = {"width": 32, "token_width": 8, "refine_width": 32, "head": 16, "columns": 8, "blocks": 1, "echo": 64}
    config = PredictorConfig(
        model=args.model, layers=trace.layers, experts=trace.num_experts, active=trace.active,
        vocabulary=vocabulary, token_rows=int(tokens.max()) + 1,
        retention=(Retention(kind="next", discount=0.9), Retention(kind="next", discount=0.96),
                   Retention(kind="sum", discount=0.85)),
        **sizes,
    )  # fmt: skip
    room = (whole.steps, whole.sequences)
    part, validation = divide(whole)
    # Tokens that only validation has must look unseen while tuning.
    partial = token_table(part.tok, vocabulary)
    data = {
        "all": prepare(whole, config, tokens),
        "part": prepare(part, config, partial, room=room),
        "validation": prepare(validation, config, partial),
        "all-shuffled": prepare(shuffle_steps(whole), config, tokens),
    }
    for split in splits:
        data[split] = prepare(held[split], config, tokens)
        data[split + "-shuffled"] = prepare(shuffle_steps(held[split]), config, tokens)
    gpu = jax.default_backend() != "cpu"
    plan = Plan(batch=16, window=512, every=100, bfloat16=gpu)
    recipe = Recipe(updates=args.updates)
    if args.smoke:
        plan, recipe = plan._replace(batch=2, window=64, every=4, warmup=2), recipe._replace(updates=4)
    session.log(f"data ready: {whole.steps} steps, {config.token_rows} token rows, {jax.devices()[0].device_kind}")
    return Trainer(session, config, plan, tokens, data, splits, recipe, args.stop_at)


def run(args: argparse.Namespace) -> int:
    session = Session(args.out, args.minutes, args.only)
    trainer = load_data(read_trace(args.trace), args, session)
    data, results = trainer.data, session.results
    part, validation, whole = data["part"], data["validation"], data["all"]
    kept: dict[str, Any] = {}

    def sweep() -> None:
        best = trainer.train("sweep base", part, validation)
        changes = CHANGES[:2] if args.smoke else CHANGES
        for change in changes:
            if session.spent() > args.sweep_share * session.limit:
                break
            name = "sweep " + ", ".join(f"{key} {value}" for key, value in change.items())
            recipe = changed(trainer.recipe, change)
            result = trainer.train(name, part, validation, recipe=recipe)
            if result.score > best.score + 3e-4:
                best, trainer.recipe = result, recipe
                session.log(f"kept: {name} ({result.score:.4f})")
        # Runs on everything have no validation: they take as many updates as the best run did.
        kept["tuned"], kept["stop"] = best.params, best.update
        results["recipe"] = trainer.recipe._asdict() | {"rates": trainer.recipe.rates._asdict()}

    def final(name: str, stem: str | None, seed: int, *, token: bool, echo: bool, control: bool = False) -> None:
        source = blank(data["all-shuffled"] if control else whole, token=token, echo=echo)
        kept[name] = trainer.train(name, source, seed=seed, stop=kept.get("stop")).params
        if stem and seed == 0:
            trainer.keep(stem, name, kept[name])
        trainer.judge(name, kept[name], token=token, echo=echo, shuffled=control)

    def distil(stem: str, *, token: bool) -> None:
        names = [f"{stem} seed {seed}" for seed in range(args.seeds) if f"{stem} seed {seed}" in kept]
        # Where time allowed for fewer some teach twice: with another number the update would be compiled anew.
        names = (names * args.seeds)[: args.seeds]
        teachers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(kept[name] for name in names))
        source = blank(whole, token=token, echo=token)
        name = f"{stem} distilled"
        recipe = trainer.recipe._replace(updates=int(1.5 * trainer.recipe.updates))
        kept[name] = trainer.train(name, source, seed=10, teachers=teachers, recipe=recipe).params
        trainer.keep(stem, name, kept[name])
        trainer.judge(name, kept[name], token=token, echo=token)

    def scheduled(stem: str, *, token: bool) -> None:
        recipe = trainer.recipe._replace(
            updates=max(4, int(0.4 * trainer.recipe.updates)), learning_rate=0.3 * trainer.recipe.learning_rate
        )
        options: dict[str, Any] = {"seed": 20, "sampled": True, "recipe": recipe}
        if token and "tuned" in kept:
            # What it costs one-step forecasts is measured on validation, and decides what is kept.
            weights = weights_of(trainer.config, jax.tree.map(jnp.asarray, kept["tuned"]))
            unsampled = validate(trainer.config, kept["tuned"], validation, trainer.plan.bfloat16)
            trial = trainer.train("token scheduled, validated", part, validation, weights=weights, **options)
            kept["cost"] = unsampled["next"] - trial.history[-1]["recall"]
            session.log(f"scheduled sampling costs {kept['cost']:.4f} of one-step recall on validation")
        name = f"{stem} scheduled"
        base = next(kept[key] for key in (f"{stem} distilled", f"{stem} seed 0") if key in kept)
        weights = weights_of(trainer.config, jax.tree.map(jnp.asarray, base))
        source = blank(whole, token=token, echo=token)
        kept[name] = trainer.train(name, source, weights=weights, **options).params
        # Evaluated, not kept: the runtime reads one-step forecasts, which it makes a little worse.
        trainer.judge(name, kept[name], token=token, echo=token)

    def latency() -> None:
        params = next(kept[name] for name in kept if " seed " in name)
        weights = weights_of(trainer.config, jax.tree.map(jnp.asarray, params))
        results["latency_us"] = measure(trainer.config, weights, trainer.tokens)
        session.log(f"microseconds inside a jitted loop: {results['latency_us']}")

    def simple() -> None:
        for name, scores in baselines(whole, trainer.config).items():
            results["predictors"][name] = {
                split: evaluate_baseline(trainer.config, scores, data[split]) for split in trainer.splits
            }

    session.attempt("sweep", sweep)
    both, routing = {"token": True, "echo": True}, {"token": False, "echo": False}
    for seed in range(args.seeds):
        name = f"token seed {seed}"
        session.attempt(name, functools.partial(final, name, "token", seed, **both))
    session.attempt("token distilled", lambda: distil("token", token=True))
    session.attempt("token scheduled", lambda: scheduled("token", token=True))
    for seed in range(args.seeds):
        name = f"activations seed {seed}"
        session.attempt(name, functools.partial(final, name, "activations", seed, **routing))
    session.attempt("activations distilled", lambda: distil("activations", token=False))
    session.attempt("latency", latency)
    session.attempt("activations scheduled", lambda: scheduled("activations", token=False))
    session.attempt("without echo", lambda: final("token without echo", None, 0, token=True, echo=False))
    session.attempt("shuffled control", lambda: final("shuffled control", None, 0, control=True, **routing))
    session.attempt("baselines", simple)
    results["seconds"] = round(session.spent(), 1)
    session.write()
    for split in trainer.splits:
        session.log(f"{split}\n" + table({name: row[split] for name, row in results["predictors"].items()}))
    if results["errors"]:
        session.log(f"errors: {results['errors']}")
    return 1 if results["errors"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0, help="no training starts after nearly all of this")
    parser.add_argument("--updates", type=int, default=800, help="of a run without a sweep before it (default: 800)")
    parser.add_argument("--stop-at", type=float, metavar="SHARE", help="a run on all of `train` stops after this share "
                        "of its schedule, such as 0.75 (default: seeds where the sweep's best run did, if there was a "
                        "sweep; else at the end)")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="predictors of each kind that are trained, "
                        "and taught from together (default: 3)")  # fmt: skip
    parser.add_argument("--sweep-share", type=float, default=0.3, help="share of the time for tuning")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts whose names begin so: sweep, "
                        "token, activations, latency, without, shuffled, baselines (default: all)")  # fmt: skip
    parser.add_argument("--model", default="openai/gpt-oss-20b")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a few sequences, to try everything out")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
