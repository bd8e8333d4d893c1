"""Reading prompts: speed and time to first token of a preset with random weights, experts streamed or on demand.

    python scripts/bench_prefill.py qwen3-30b-a3b-fp8 --residencies 0.25 0.45 --lengths 512 2048 4096 --out prefill.json

Each setting reads prompts of random tokens, all of one length, and samples one token. The first reading compiles; of
the following ones the median counts, of a cache that stays warm between them. Random tokens through random weights
use nearly every expert of every layer, as long prompts of text do (paper 8.4).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seqmoe_jax.compilation import enable_compilation_cache
from seqmoe_jax.engine import Model, TokenEngine
from seqmoe_jax.loading import random_model
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.presets import preset_path

COLUMNS = (
    "residency  mode       tokens   TTFT s  (least to most)   tok/s   streamed  on demand   GB moved   GB/s   hit rate"
)


def bench(
    model: Model, *, residency: float, stream: bool, lengths: list[int], policy: str, batch: int, repeats: int
) -> list[dict[str, Any]]:
    """One row per prompt length; all of one engine, so that the slots are warm."""
    rng, rows = np.random.default_rng(0), []
    lengths = [min(length, model.spec.context - 1) for length in lengths]
    context = max(lengths) + 1
    engine = TokenEngine(
        model,
        EngineOptions(policy=policy, residency=residency, max_batch=batch, context=context),
        stream_prompts=stream,
    )
    for length in lengths:
        runs = []
        for _ in range(repeats + 1):
            prompts = [rng.integers(0, model.spec.vocab, length).tolist() for _ in range(batch)]
            list(engine.run(prompts, max_new_tokens=1))
            runs.append(replace(engine.last_stats))
        compile_s, runs = runs[0].compile_s, runs[1:]
        times = [run.ttft_s for run in runs]
        loaded = statistics.median(run.experts_loaded for run in runs)
        streamed, ttft = statistics.median(run.experts_streamed for run in runs), statistics.median(times)
        moved = (loaded + streamed) * engine.config.layout.block_bytes
        memory = jax.devices()[0].memory_stats() or {}
        rows.append(
            {
                "residency": round(engine.plan.residency, 4),
                "mode": "full" if residency == 1 else "streamed" if stream else "on demand",
                "batch": batch,
                "tokens": length,
                "ttft_s": ttft,
                "spread": [min(times), max(times)],
                "tokens_per_second": batch * length / ttft,
                "streamed": streamed,
                "loaded": loaded,
                "bytes_moved": moved,
                "bytes_per_second": moved / ttft,
                "prefill_hit_rate": statistics.median(run.prefill_hit_rate for run in runs),
                "compile_s": round(compile_s, 1),
                "planned_bytes": engine.plan.total,
                "peak_bytes": memory.get("peak_bytes_in_use"),
            }
        )
    engine.close()
    return rows


def line(row: dict[str, Any]) -> str:
    low, high = row["spread"]
    return (
        f"{row['residency']:9.3f}  {row['mode']:9} {row['tokens']:7} {row['ttft_s']:8.3f}  "
        f"({low:.3f} to {high:.3f}) {row['tokens_per_second']:9.0f} {row['streamed']:9.0f} {row['loaded']:10.0f} "
        f"{row['bytes_moved'] / 1e9:10.2f} {row['bytes_per_second'] / 1e9:6.1f} {row['prefill_hit_rate']:10.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--residencies", nargs="+", type=float, default=[0.25, 0.45])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 4096])
    parser.add_argument("--modes", nargs="+", choices=["streamed", "on-demand"], default=["streamed", "on-demand"])
    parser.add_argument("--policy", default="seqmoe")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    enable_compilation_cache()
    started = time.perf_counter()
    model = random_model(preset_path(args.preset), name=args.preset)
    jax.block_until_ready(model.weights)
    experts = sum(pool.nbytes for pool in model.pools) / 1e9
    print(f"{args.preset}: {experts:.1f} GB of experts, made in {time.perf_counter() - started:.1f} s", flush=True)
    print(COLUMNS, flush=True)
    result: dict[str, Any] = {
        "preset": args.preset,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "experts_gb": experts,
        "rows": [],
    }
    for residency in args.residencies:
        # With every expert resident there is nothing to stream.
        for mode in args.modes if residency < 1 else args.modes[:1]:
            rows = bench(
                model,
                residency=residency,
                stream=mode == "streamed",
                lengths=args.lengths,
                policy=args.policy,
                batch=args.batch,
                repeats=args.repeats,
            )
            result["rows"] += rows
            if args.out:
                args.out.write_text(json.dumps(result))
            for row in rows:
                print(line(row), flush=True)


if __name__ == "__main__":
    main()
