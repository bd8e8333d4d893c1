"""One preset at several residencies: the same tokens? Time to first token, decode speed and memory of each.

python -m scripts.checks.residencies PRESET [--layers N] [--residency .25 .45 1] [--prompts 128 4000] [--replay T.npz]

Without --replay the model routes by itself. Prompts are generated once to compile and once to measure, greedy and
sampled by turns; the tokens of all generations are compared with those of the first residency. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from scripts.checks.pool_memory import memory_in_use
from seqmoe_jax.bench.replayed import replay_of
from seqmoe_jax.compilation import enable_compilation_cache
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.loading import random_model
from seqmoe_jax.models.model import Model
from seqmoe_jax.options import EngineOptions, SamplingConfig
from seqmoe_jax.presets import preset_path
from seqmoe_jax.traces.format import read_trace

WAYS = {"greedy": SamplingConfig(temperature=0.0), "sampled": SamplingConfig(temperature=1.0, seed=1)}


def cut(preset: str, layers: int | None) -> dict[str, Any]:
    """The preset's configuration, of its first `layers` layers."""
    config = json.loads(preset_path(preset).read_text())
    if layers is None:
        return config
    kept = {"num_hidden_layers": layers}
    for name in ("layer_types", "compress_ratios"):
        if name in config:
            kept[name] = config[name][:layers]
    return config | kept


def generations(model: Model, residency: float, args: argparse.Namespace, replay: Any) -> list[dict[str, Any]]:
    options = EngineOptions(
        residency=residency, policy="full" if residency == 1 else "lru", context=max(args.prompts) + args.new + 1
    )
    engine = TokenEngine(model, options, replay=replay)
    rows: list[dict[str, Any]] = []
    try:
        for length in args.prompts:
            prompt = np.random.default_rng(length).integers(0, model.spec.vocab, length).tolist()
            for way in args.ways:
                for _ in range(2):
                    begun = time.perf_counter()
                    tokens = [
                        event.token for event in engine.run([prompt], max_new_tokens=args.new, sampling=WAYS[way])
                    ]
                    seconds, stats = time.perf_counter() - begun, engine.last_stats
                rows.append({
                    "residency": residency, "prompt": length, "way": way, "ttft_s": round(stats.ttft_s, 3),
                    "tokens_per_second": round(stats.tokens_per_second, 1), "hit_rate": round(stats.hit_rate, 4),
                    "seconds": round(seconds, 2), "tokens": tokens,
                })  # fmt: skip
    finally:
        engine.close()
    memory = next(iter(model.weights.embed.devices())).memory_stats() or {}
    for row in rows:
        row |= {"planned": engine.plan.total, "device_in_use": memory.get("bytes_in_use")}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("preset")
    add("--layers", type=int, help="the first so many")
    add("--residency", type=float, nargs="+", default=[0.25, 0.45, 1.0])
    add("--prompts", type=int, nargs="+", default=[128, 4000], help="tokens of each")
    add("--new", type=int, default=64, help="tokens generated")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--replay", type=Path, metavar="T.npz", help="routing forced on the model, stretched to its shape")
    args = parser.parse_args()
    enable_compilation_cache()
    before, start = memory_in_use(), time.perf_counter()
    model = random_model(cut(args.preset, args.layers), name=args.preset)
    jax.block_until_ready((model.weights, model.pools))
    pool = sum(array.nbytes for array in model.pools)
    seconds, taken = time.perf_counter() - start, memory_in_use() - before
    print(f"experts {pool / 1e9:.2f} GB, host memory taken {taken / 1e9:.2f} GB, ready in {seconds:.1f} s", flush=True)
    replays: dict[str, Any] = {"own": None}
    if args.replay:
        replays["replayed"] = replay_of(read_trace(args.replay).select("test"), model.spec, 4 * args.new)
    rows: list[dict[str, Any]] = []
    for routing, replay in replays.items():
        for residency in args.residency:
            rows += [row | {"routing": routing} for row in generations(model, residency, args, replay)]
            for row in rows:
                first = next(r for r in rows if all(r[k] == row[k] for k in ("routing", "prompt", "way")))
                row["same_tokens"] = row["tokens"] == first["tokens"]
            for row in [row for row in rows if row["residency"] == residency and row["routing"] == routing]:
                print({**row, "tokens": row["tokens"][:4], "distinct": len(set(row["tokens"]))}, flush=True)
    result = {"preset": args.preset, "layers": args.layers, "pool": pool, "taken": taken, "load_s": seconds}
    print(json.dumps(result | {"rows": rows, "all_same": all(row["same_tokens"] for row in rows)}))


if __name__ == "__main__":
    main()
