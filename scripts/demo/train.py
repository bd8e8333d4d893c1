"""Trains the demo model for a fixed time.

    python -m scripts.demo.train DATA_DIR --out OUT_DIR --minutes 8.5

The learning rate follows the fraction of `--minutes` that has passed since the process started, so it has always
decayed to its end when time is up. OUT_DIR gets `log.json` (configuration, loss curve, held-out bits per byte) and
the exported weights in parts (see `export.py`), both renewed every `--checkpoint-every` seconds. The full training
state goes to the file `--state` at the same moments; `--resume` continues from it. `--smoke` trains a tiny model
through the same code on any backend.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array

from scripts.demo import data, evaluate, export
from scripts.demo.model import Compute, ModelConfig, Params, init_params, loss_fn
from scripts.demo.optimizer import OptimizerConfig, make_optimizer

STARTED = time.monotonic()
SMOKE_MODEL = ModelConfig(
    layers=2, hidden=32, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=4, top_k=2, width=16
)
State = tuple[Params, optax.OptState]
Chunk = Callable[[State, data.TrainingText, Array, Array], tuple[State, dict[str, Array]]]


def elapsed() -> float:
    return time.monotonic() - STARTED


def say(message: str) -> None:
    print(f"[{elapsed():6.1f} s] {message}", flush=True)


def schedule(fraction: float, peak: float) -> float:
    """The learning rate after a share of the time: linear warm-up over 2 %, then a cosine down to 1 % of `peak`."""
    shape = optax.warmup_cosine_decay_schedule(0.02, 1.0, warmup_steps=200, decay_steps=10_000, end_value=0.01)
    return peak * float(shape(fraction * 10_000))


def build_chunk(
    config: ModelConfig,
    compute: Compute,
    opt: optax.GradientTransformation,
    *,
    batch: int,
    length: int,
    steps: int,
) -> Chunk:
    """A jitted function that makes `steps` optimiser steps on freshly drawn windows and returns mean figures."""

    def step(state: State, key: Array, text: data.TrainingText, rate: Array) -> tuple[State, dict[str, Array]]:
        tokens = data.draw(text, key, batch, length + 1)
        grads, parts = jax.grad(loss_fn, has_aux=True)(state[0], tokens, config, compute)
        updates, opt_state = opt.update(grads, state[1], state[0])
        params = optax.apply_updates(state[0], jax.tree.map(lambda update: rate * update, updates))
        return (params, opt_state), {**parts, "grad_norm": optax.global_norm(grads)}

    @functools.partial(jax.jit, donate_argnums=0)
    def chunk(state: State, text: data.TrainingText, key: Array, rate: Array) -> tuple[State, dict[str, Array]]:
        keys = jax.random.split(key, steps)
        state, figures = lax.scan(lambda state, sub: step(state, sub, text, rate), state, keys)
        return state, {name: value.mean() for name, value in figures.items()}

    return chunk


def choose_compute(args: argparse.Namespace, make: Callable[[Compute], float]) -> tuple[Compute, dict[str, float]]:
    """The fastest way to compute the model here, in tokens per second. A way that fails is reported and left out."""
    if jax.default_backend() != "gpu":
        candidates = [Compute(dtype=args.dtype)]
    else:
        candidates = [Compute(args.dtype, "cudnn"), Compute(args.dtype, "xla", remat=True)]
    speeds: dict[str, float] = {}
    best, best_speed = candidates[-1], 0.0
    for candidate in candidates:
        try:
            speed = make(candidate)
        except Exception as error:
            say(f"probe {candidate}: {type(error).__name__}: {str(error)[:500]}")
            continue
        say(f"probe {candidate}: {speed:,.0f} tokens/s")
        speeds[str(candidate)] = speed
        if speed > best_speed:
            best, best_speed = candidate, speed
        if candidate.attention == "cudnn" and not args.probe_all:
            break  # the rest are fallbacks: not worth their compile time
    if not speeds:
        raise SystemExit("no way of computing the model works here")
    return best, speeds


class Run:
    """One training run: state, log, checkpoints."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.config = SMOKE_MODEL if args.smoke else ModelConfig()
        settings = OptimizerConfig(name=args.optimizer, matrix_decay=args.matrix_decay, other_decay=args.other_decay)
        self.opt = make_optimizer(settings)
        self.state: State | None = None
        self.steps = 0
        self.best = math.inf
        self.earlier = 0.0  # seconds of the runs this one resumes
        self.log: dict[str, Any] = {
            "argv": sys.argv[1:],
            "model": asdict(self.config),
            "parameters": self.config.parameters(),
            "optimizer": settings._asdict(),
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "curve": [],
            "validation": [],
        }

    def new_state(self) -> State:
        params = init_params(self.config, jax.random.key(self.args.seed))
        return params, self.opt.init(params)

    def save(self, *, params: dict[str, np.ndarray] | None = None) -> None:
        """Log, exported weights (those given, or the current ones) and the state for resuming."""
        assert self.state is not None
        host = jax.tree.map(np.asarray, self.state)
        export.write_parts(
            export.safetensors_bytes(params if params is not None else host[0]),
            self.args.out,
            steps=self.steps,
        )
        (self.args.out / "log.json").write_text(json.dumps(self.log) + "\n")
        if self.args.state:
            temporary = self.args.state.with_suffix(".tmp")
            temporary.write_bytes(
                pickle.dumps({"state": host, "steps": self.steps, "log": self.log, "seconds": self.earlier + elapsed()})
            )
            temporary.replace(self.args.state)

    def resume(self) -> None:
        saved = pickle.loads(self.args.state.read_bytes())  # written by `save`
        self.state = jax.tree.map(jnp.asarray, saved["state"])
        self.steps, self.log, self.earlier = saved["steps"], saved["log"], saved["seconds"]
        say(f"resumed at step {self.steps}")

    def main(self) -> None:
        args = self.args
        if args.backend and jax.default_backend() != args.backend:
            raise SystemExit(f"JAX uses the {jax.default_backend()} backend, not {args.backend}")
        budget = args.minutes * 60
        say(f"{self.config.parameters():,} parameters on {jax.devices()[0].device_kind}, jax {jax.__version__}")
        window = args.length + 1
        text = data.load_training(args.data, window)
        validation = data.load_validation(args.data, args.length, 2 if args.smoke else None)
        report = data.read_report(args.data)
        say(f"{text.tokens.shape[0]:,} training tokens, {len(validation.windows)} validation windows")
        per_chunk = args.batch * args.length * args.steps_per_call
        self.log["tokens_per_step"] = args.batch * args.length
        self.log["training_tokens"] = int(text.tokens.shape[0])
        chunks: dict[Compute, Chunk] = {}

        def probe(compute: Compute) -> float:
            """Tokens per second; the state it uses is thrown away."""
            chunks[compute] = build_chunk(
                self.config,
                compute,
                self.opt,
                batch=args.batch,
                length=args.length,
                steps=args.steps_per_call,
            )
            state = self.new_state()
            key, rate = jax.random.key(0), jnp.float32(1e-4)
            state, figures = chunks[compute](state, text, key, rate)
            loss = float(figures["loss"])
            say(f"compiled; first loss {loss:.3f}")
            if not 0.8 * math.log(self.config.vocab) < loss < 1.3 * math.log(self.config.vocab):
                raise ValueError(f"the first loss is {loss}, not about the log of the vocabulary")
            began = time.monotonic()
            state, figures = chunks[compute](state, text, key, rate)
            float(figures["loss"])
            return per_chunk / (time.monotonic() - began)

        compute, speeds = choose_compute(args, probe)
        self.log |= {"compute": str(compute), "probed_tokens_per_second": speeds}
        chunk = chunks[compute]
        evaluator = evaluate.Evaluator(self.config, compute, batch=args.eval_batch)
        if args.resume and args.state and args.state.exists():
            self.resume()
        if self.state is None:
            self.state = self.new_state()
        best_params: dict[str, np.ndarray] | None = None
        best_steps = 0
        key = jax.random.key(args.seed + 1)
        last_save = last_eval = last_line = elapsed()
        train_began = elapsed()
        self.log["seconds_before_training"] = round(train_began, 1)
        seconds_per_chunk = per_chunk / max(speeds.values())

        def validate() -> float:
            assert self.state is not None
            result = evaluator(self.state[0], validation, report)
            row = {"seconds": round(self.earlier + elapsed(), 1), "steps": self.steps, **result}
            self.log["validation"].append(row)
            say(f"  held out: {result['mean_bpb']:.4f} bits/byte (mean of domains) {result['domains']}")
            return float(result["mean_bpb"])

        while elapsed() + 1.5 * seconds_per_chunk < budget and not (args.max_steps and self.steps >= args.max_steps):
            fraction = (elapsed() - train_began) / (budget - train_began)
            if args.resume:
                fraction = (self.earlier + elapsed()) / (self.earlier + budget)
            if args.max_steps:
                fraction = self.steps / args.max_steps
            rate = schedule(fraction, args.rate)
            began = time.monotonic()
            self.state, figures = chunk(self.state, text, jax.random.fold_in(key, self.steps), jnp.float32(rate))
            self.steps += args.steps_per_call
            line = {name: float(value) for name, value in figures.items()}
            seconds_per_chunk = time.monotonic() - began
            speed = per_chunk / seconds_per_chunk
            self.log["curve"].append([self.steps, round(self.earlier + elapsed(), 1), round(line["loss"], 4), rate])
            if elapsed() - last_line > args.log_every or self.steps == args.steps_per_call:
                last_line = elapsed()
                say(
                    f"step {self.steps} rate {rate:.2e} loss {line['loss']:.3f} balance {line['balance']:.3f} "
                    f"least share {line['least_share']:.4f} router z {line['router_z']:.2f} "
                    f"gradient {line['grad_norm']:.2f} {speed:,.0f} tokens/s"
                )
                if not math.isfinite(line["loss"]):
                    raise SystemExit("the loss is not finite")
            if elapsed() - last_eval > args.eval_every:
                value = validate()
                if value < self.best:
                    self.best, best_steps = value, self.steps
                    best_params = {name: np.asarray(array) for name, array in self.state[0].items()}
                last_eval = elapsed()
            if elapsed() - last_save > args.checkpoint_every:
                self.save()
                last_save = elapsed()
                say("  checkpoint written")
        final = validate()
        keep_best = best_params is not None and self.best < final
        self.log |= {
            "steps": self.steps,
            "tokens": self.steps * self.log["tokens_per_step"],
            "training_seconds": round(self.earlier + elapsed() - train_began, 1),
            "exported": "best held-out checkpoint" if keep_best else "last step",
            "exported_steps": best_steps if keep_best else self.steps,
        }
        self.save(params=best_params if keep_best else None)
        say(f"done: {self.log['tokens']:,} tokens in {self.steps} steps; exported the {self.log['exported']}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="from the start of the process to the last step")
    parser.add_argument("--batch", type=int, default=64, help="windows per step")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps-per-call", type=int, default=10)
    parser.add_argument("--max-steps", type=int, default=0, help="end (and decay) by steps instead of by time")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--matrix-decay", type=float, default=0.2)
    parser.add_argument("--other-decay", type=float, default=0.1)
    parser.add_argument("--backend", help="stop at once where JAX uses another one")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="file for the full training state")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--probe-all", action="store_true", help="time the fallbacks too")
    parser.add_argument("--eval-batch", type=int, default=32)
    parser.add_argument("--eval-every", type=float, default=45.0, help="seconds")
    parser.add_argument("--checkpoint-every", type=float, default=120.0, help="seconds")
    parser.add_argument("--log-every", type=float, default=10.0, help="seconds")
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    Run(parse_args()).main()
