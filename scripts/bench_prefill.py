"""Reading prompts: speed and time to the first token of a preset with random weights.

    python -m scripts.bench_prefill qwen3-30b-a3b-fp8 --residencies 0.25 0.45 --lengths 512 2048 4096 --out prefill.json

Each setting reads prompts of random tokens, all of one length, and samples one token. The first reading compiles; of
the following ones the median counts, of a cache that stays warm between them. Random tokens through random weights
use nearly every expert of every layer, as long prompts of text do (paper 8.4).
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seqmoe_jax.compilation import enable_compilation_cache
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.loading import random_model
from seqmoe_jax.models.model import Model
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.presets import preset_path


def bench(model: Model, options: EngineOptions, lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    """One row per prompt length; all of one engine, so that the slots are warm."""
    rng, rows = np.random.default_rng(0), []
    engine = TokenEngine(model, options)
    for length in lengths:
        runs = []
        for _ in range(repeats + 1):
            prompts = [rng.integers(0, model.spec.vocab, length).tolist() for _ in range(options.max_batch)]
            list(engine.run(prompts, max_new_tokens=1))
            runs.append(replace(engine.last_stats))
        warm = runs[1:]
        times, ttft = [run.ttft_s for run in warm], statistics.median(run.ttft_s for run in warm)
        moved = statistics.median(run.bytes_moved for run in warm)
        rows.append(
            {
                "residency": round(engine.plan.residency, 4),
                "batch": options.max_batch,
                "tokens": length,
                "ttft_s": ttft,
                "spread": [min(times), max(times)],
                "tokens_per_second": options.max_batch * length / ttft,
                "loaded": statistics.median(run.experts_loaded for run in warm),
                "bytes_moved": moved,
                "bytes_per_second": moved / ttft,
                "prefill_hit_rate": statistics.median(run.prefill_hit_rate for run in warm),
                "compile_s": round(runs[0].compile_s, 1),
                "planned_bytes": engine.plan.total,
                "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
            }
        )
    engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--residencies", nargs="+", type=float, default=[0.25, 0.45])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 4096])
    parser.add_argument("--policy", default="seqmoe")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    enable_compilation_cache()
    config, longest = json.loads(preset_path(args.preset).read_text()), max(args.lengths) + 1
    # Rotation has no table: a preset's shape can be measured beyond the positions that it names.
    config["max_position_embeddings"] = max(longest, config.get("max_position_embeddings", 0))
    model, lengths = random_model(config, name=args.preset), args.lengths
    result: dict[str, Any] = {"preset": args.preset, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    result["rows"] = rows = []
    print("residency  tokens   TTFT s  (least to most)     tok/s   loaded   GB moved   GB/s   hit rate", flush=True)
    for residency in args.residencies:
        options = EngineOptions(policy=args.policy, residency=residency, max_batch=args.batch, context=longest)
        for row in bench(model, options, lengths, args.repeats):
            rows.append(row)
            low, high = row["spread"]
            print(
                f"{row['residency']:9.3f} {row['tokens']:7} {row['ttft_s']:8.3f}  ({low:.3f} to {high:.3f}) "
                f"{row['tokens_per_second']:9.0f} {row['loaded']:8.0f} {row['bytes_moved'] / 1e9:10.2f} "
                f"{row['bytes_per_second'] / 1e9:6.1f} {row['prefill_hit_rate']:10.3f}", flush=True,
            )  # fmt: skip
        if args.out:
            args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
