"""Puts what `scripts.train_predictors` wrote where the package ships it, with its evaluation beside it.

python -m scripts.install_predictor DIR --stem token --retention 0 [--to seqmoe_jax/predictors/gpt-oss-20b]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from seqmoe_jax.forecast import store
from seqmoe_jax.forecast.training.variants import one_retention

LIMIT = 25_000_000  # bytes of what ships


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--stem", default="token")
    parser.add_argument("--retention", type=int, default=0, help="index of the retention score that ships")
    parser.add_argument("--to", type=Path)
    args = parser.parse_args()
    config, weights = store.load(args.source, stem=args.stem)
    tokens = weights.pop("token_table", None)
    config, weights = one_retention(config, weights, args.retention)
    target = args.to or store.SHIPPED / config.model.rsplit("/", 1)[-1].lower()
    for old in target.glob("*.safetensors"):
        old.unlink()
    paths = store.save(target, config, weights, tokens)
    total = sum(path.stat().st_size for path in paths)
    results = json.loads((args.source / "results.json").read_text())
    rows = results["predictors"]
    baselines = ("popularity", "repeat-last", "first-order", "shuffled control")
    name = results["kept"][args.stem]
    shown = {key: rows[key] for key in (*baselines, name) if key in rows}
    splits = sorted({split for row in shown.values() for split in row})
    evaluation = {
        "kept": name,
        "recipe": results.get("recipe"),
        "splits": {
            split: {"predictors": {key: row[split] for key, row in shown.items() if split in row}} for split in splits
        },
    }
    (target / store.EVALUATION).write_text(json.dumps(evaluation, indent=1))
    print(f"{target}: {len(paths)} parts, {total / 1e6:.1f} MB, from run {name!r}")
    return 0 if args.to is not None or total <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
