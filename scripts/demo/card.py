"""Assembles `seqmoe_jax/demo` and writes its model card from the logs.

    python -m scripts.demo.card PARTS_DIR DATA_DIR MODEL_DIR    # weights, configuration, tokenizer
    python -m scripts.demo.evaluate MODEL_DIR DATA_DIR --out evaluation.json --limit 2
    python -m scripts.demo.card PARTS_DIR DATA_DIR MODEL_DIR --evaluation evaluation.json    # and README.md

PARTS_DIR is the `--out` of `train.py`. No figure in the card is typed by hand: held-out bits per byte and expert
usage are those that the training log has for the exported step over all held-out text; samples and the comparison
with transformers come from `evaluate.py`. `training.json` beside the card has the same figures for programs.
`--other-log LOG` adds a sentence about a run of another length.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.demo import export
from scripts.demo.data import read_report
from scripts.demo.model import ModelConfig

TEMPLATE = Path(__file__).with_name("card.md")
LIMIT_BYTES = 40_000_000
CURVE_ROWS = 16
OPTIMIZERS = {"muon": "Muon for the matrices, AdamW for the rest", "adamw": "AdamW"}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def held_out(log: dict[str, Any]) -> dict[str, Any]:
    """The validation row of the exported weights."""
    row: dict[str, Any] = next(row for row in log["validation"] if row["steps"] == log["exported_steps"])
    return row


def curve_table(log: dict[str, Any]) -> str:
    """About `CURVE_ROWS` even steps of the loss curve, each the mean of the steps since the row before."""
    curve = log["curve"]
    count = min(CURVE_ROWS, len(curve))
    rows = []
    for index in range(count):
        part = curve[index * len(curve) // count : (index + 1) * len(curve) // count]
        steps, seconds, _, rate = part[-1]
        loss = sum(point[2] for point in part) / len(part)
        held = [f"{row['mean_bpb']:.3f}" for row in log["validation"] if part[0][0] <= row["steps"] <= steps]
        millions = steps * log["tokens_per_step"] / 1e6
        rows.append((f"{millions:.0f} M", f"{seconds:.0f}", f"{rate:.1e}", f"{loss:.3f}", ", ".join(held)))
    return table(("tokens", "seconds", "learning rate", "training loss", "held-out bits/byte"), rows)


def passes_table(log: dict[str, Any], report: list[dict[str, Any]]) -> str:
    """Tokens, share of the training windows and passes per source."""
    weights = [row["rate"] * row["train_tokens"] for row in report]
    rows = []
    for row, weight in zip(report, weights, strict=True):
        share = weight / sum(weights)
        passes = share * log["tokens"] / row["train_tokens"]
        rows.append((row["name"], row["domain"], f"{row['train_tokens']:,}", f"{share:.1%}", f"{passes:.1f}"))
    return table(("source", "domain", "training tokens", "share of training", "passes"), rows)


def samples_text(samples: list[dict[str, Any]]) -> str:
    """All samples in fences, by temperature."""
    sections = []
    for temperature in dict.fromkeys(sample["temperature"] for sample in samples):
        sections.append(f"Temperature {temperature}, top 40:" if temperature else "Greedy:")
        for sample in samples:
            if sample["temperature"] == temperature:
                sections.append(f"````text\n{sample['prompt']}⟶{sample['text'].rstrip()}\n````")
    return "\n\n".join(sections)


def other_run(log: dict[str, Any]) -> str:
    """What a run with the same settings but another length did."""
    rows = log["validation"]
    best = min(rows, key=lambda row: row["mean_bpb"])
    return (
        f"A run of {log['tokens'] / 1e6:.0f} M tokens ({log['tokens'] / log['training_tokens']:.1f} passes) with the "
        f"same settings was best at {best['steps'] * log['tokens_per_step'] / 1e6:.0f} M tokens "
        f"({best['mean_bpb']:.3f} bits per byte, mean of the domains) and then over-fitted (to "
        f"{rows[-1]['mean_bpb']:.3f} at its end); the run shipped here was made shorter for that reason."
    )


def card(
    log: dict[str, Any],
    report: list[dict[str, Any]],
    evaluation: dict[str, Any],
    size: int,
    other: dict[str, Any] | None = None,
) -> str:
    """`README.md`."""
    model = ModelConfig(**log["model"])
    figures, check = held_out(log), evaluation["transformers"]
    entropy = figures["usage_entropy"]
    idle = model.layers * (model.num_experts - model.top_k) * 3 * model.hidden * model.width
    usage = zip(entropy, figures["least_share"], figures["most_share"], strict=True)
    sources_of = {
        row["domain"]: [other["name"] for other in report if other["domain"] == row["domain"]] for row in report
    }
    values = {
        "parameters": f"{model.parameters() / 1e6:.1f}",
        "active": f"{(model.parameters() - idle) / 1e6:.1f}",
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "experts": model.num_experts,
        "width": model.width,
        "chosen": model.top_k,
        "vocab": f"{model.vocab:,}",
        "max_positions": f"{model.max_positions:,}",
        "megabytes": f"{size / 1e6:.1f}",
        "length": f"{evaluation['length']:,}",
        "tokens": f"{log['tokens'] / 1e6:.0f}",
        "steps": f"{log['steps']:,}",
        "tokens_per_step": f"{log['tokens_per_step']:,}",
        "minutes": f"{log['training_seconds'] / 60:.1f}",
        "device": log["device"],
        "jax": log["jax"],
        "speed": f"{max(log['probed_tokens_per_second'].values()):,.0f}",
        "passes": f"{log['tokens'] / log['training_tokens']:.1f}",
        "training_tokens": f"{log['training_tokens'] / 1e6:.1f}",
        "optimizer": OPTIMIZERS[log["optimizer"]["name"]],
        "exported": log["exported"],
        "other": other_run(other) if other else "",
        "command": " ".join(log["command"]),
        "curve": curve_table(log),
        # A source's shard starts with an end-of-text token and has one after each document.
        "held_out_tokens": f"{sum(row['val_tokens'] - row['val_documents'] - 1 for row in report):,}",
        "domains": table(
            ("domain", "sources", "bits per byte"),
            [(name, ", ".join(sources_of[name]), f"{value:.3f}") for name, value in figures["domains"].items()],
        ),
        "mean_bpb": f"{figures['mean_bpb']:.3f}",
        "bpb": f"{figures['bpb']:.3f}",
        "sources": ", ".join(f"{name} {value:.3f}" for name, value in figures["sources"].items()),
        "least_entropy": f"{min(entropy):.3f}",
        "mean_entropy": f"{sum(entropy) / len(entropy):.3f}",
        "even": f"{1 / model.num_experts:.2%}",
        "usage": table(
            ("layer", "usage entropy", "least used expert", "most used expert"),
            [(i, f"{value:.3f}", f"{least:.2%}", f"{most:.2%}") for i, (value, least, most) in enumerate(usage)],
        ),
        "check_tokens": f"{check['tokens']:,.0f}",
        "difference": f"{check['largest_logit_difference']:.1e}",
        "largest": f"{check['largest_logit']:.1f}",
        "their_loss": f"{check['transformers_loss']:.6f}",
        "our_loss": f"{check['loss']:.6f}",
        "samples": samples_text(evaluation["samples"]),
        "attributions": table(
            ("source", "from", "licence", "documents", "bytes"),
            [(r["name"], r["source"], r["licence"], r["documents"], r["bytes_of_text"]) for r in report],
        ),
        "passes_per_source": passes_table(log, report),
    }
    return TEMPLATE.read_text(encoding="utf-8").format(**values)


def assemble(parts: Path, data: Path, model_dir: Path, config: ModelConfig) -> None:
    """Weights, configuration and tokenizer."""
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / export.NAME).write_bytes(export.join_parts(parts))
    (model_dir / "config.json").write_text(json.dumps(config.hf(), indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data / name, model_dir / name)
    generation = {"do_sample": True, "temperature": 0.7, "top_k": 40, "eos_token_id": [0, 2], "pad_token_id": 0}
    (model_dir / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def read_log(path: Path) -> dict[str, Any]:
    """A training log, with the folders of whoever ran it replaced by names."""
    log: dict[str, Any] = json.loads(path.read_text())
    words = ["DATA", *log.pop("argv")[1:]]
    for option, name in (("--out", "OUT"), ("--state", "STATE")):
        if option in words:
            words[words.index(option) + 1] = name
    log["command"] = words
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--evaluation", type=Path, help="what evaluate.py wrote")
    parser.add_argument("--other-log", type=Path, help="log.json of a run of another length")
    args = parser.parse_args()
    log = read_log(args.parts / "log.json")
    assemble(args.parts, args.data, args.model, ModelConfig(**log["model"]))
    if args.evaluation:
        report, evaluation = read_report(args.data), json.loads(args.evaluation.read_text())
        other = read_log(args.other_log) if args.other_log else None
        figures = {"held_out": held_out(log), "evaluation": evaluation, "log": log}
        (args.model / "training.json").write_text(json.dumps(figures) + "\n")
        size = sum(path.stat().st_size for path in args.model.iterdir() if path.name != "README.md")
        (args.model / "README.md").write_text(card(log, report, evaluation, size, other), encoding="utf-8")
    total = sum(path.stat().st_size for path in args.model.iterdir())
    print(f"{args.model}: {total / 1e6:.2f} MB")
    if total > LIMIT_BYTES:
        raise SystemExit(f"more than {LIMIT_BYTES} bytes")


if __name__ == "__main__":
    main()
