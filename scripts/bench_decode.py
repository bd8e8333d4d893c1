"""Decode speed of a preset with random weights at several residencies, policies and batch sizes, in one process.

python scripts/bench_decode.py qwen3-30b-a3b-fp8 --residencies 1.0 0.45 --policies lru seqmoe --out decode.json

Tokens are sampled at temperature 1 unless told otherwise: random weights decoded greedily repeat one token, and so
one set of experts; the routing of random tokens is flatter than that of text, so hit rates are a lower bound. The first
generation of every setting warms the cache and the programs; the median of the following ones is reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seqmoe_jax.compilation import enable_compilation_cache
from seqmoe_jax.engine import Model, TokenEngine
from seqmoe_jax.loading import random_model
from seqmoe_jax.presets import preset_path
from seqmoe_jax.sampling import SamplingConfig


def bench(
    model: Model, *, policy: str, residency: float, batch: int, prompt: int, new: int, repeats: int, temperature: float
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    engine = TokenEngine(model, policy=policy, residency=residency, max_batch=batch, context=prompt + new)
    runs, first = [], []
    for repeat in range(repeats + 1):
        prompts = [rng.integers(0, model.spec.vocab, prompt).tolist() for _ in range(batch)]
        sampling = SamplingConfig(temperature=temperature, seed=repeat)
        tokens = [event.token for event in engine.run(prompts, max_new_tokens=new, sampling=sampling)]
        if repeat == 0:
            compile_s = engine.last_stats.compile_s
            first = tokens
        else:
            runs.append(engine.last_stats)
    memory = jax.devices()[0].memory_stats() or {}
    speeds = [run.tokens_per_second for run in runs]
    return {
        "policy": policy,
        "residency": round(engine.plan.residency, 4),
        "slots": engine.plan.slots,
        "batch": batch,
        "tokens_per_second": statistics.median(speeds),
        "spread": [min(speeds), max(speeds)],
        "hit_rate": statistics.median(run.hit_rate for run in runs),
        "ttft_s": statistics.median(run.ttft_s for run in runs),
        "loaded_per_step": statistics.median(run.experts_loaded for run in runs) / new,
        "compile_s": round(compile_s, 1),
        "planned_gb": round(engine.plan.total / 1e9, 2),
        "in_use_gb": round(memory.get("bytes_in_use", 0) / 1e9, 2),
        "peak_gb": round(memory.get("peak_bytes_in_use", 0) / 1e9, 2),
        "kernels": engine.config.implementation,
        "first_tokens": first[:16],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset")
    parser.add_argument("--residencies", nargs="+", type=float, default=[1.0, 0.45])
    parser.add_argument("--policies", nargs="+", default=["lru"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    enable_compilation_cache()
    started = time.perf_counter()
    model = random_model(preset_path(args.preset), name=args.preset)
    jax.block_until_ready(model.weights)
    result: dict[str, Any] = {
        "preset": args.preset,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "experts_gb": sum(pool.nbytes for pool in model.pools) / 1e9,
        "make_model_s": time.perf_counter() - started,
        "rows": [],
    }
    print(
        f"{args.preset}: {result['experts_gb']:.1f} GB of experts, made in {result['make_model_s']:.1f} s", flush=True
    )
    print(
        "policy       residency  batch   tok/s     spread          hit rate  loads/step  TTFT s   peak GB", flush=True
    )
    for residency in args.residencies:
        # At residency 1 nothing is ever evicted: one policy stands for all.
        for policy in ["full"] if residency == 1 else args.policies:
            for batch in args.batches:
                row = bench(
                    model,
                    policy=policy,
                    residency=residency,
                    batch=batch,
                    prompt=args.prompt,
                    new=args.new,
                    repeats=args.repeats,
                    temperature=args.temperature,
                )
                result["rows"].append(row)
                if args.out:
                    args.out.write_text(json.dumps(result))
                low, high = row["spread"]
                print(
                    f"{policy:12} {row['residency']:9.3f} {batch:6} {row['tokens_per_second']:8.1f} "
                    f"{low:8.1f}-{high:<8.1f} {row['hit_rate']:8.3f} {row['loaded_per_step']:10.2f} "
                    f"{row['ttft_s']:9.3f} {row['peak_gb']:8.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
