"""Held-out bits per byte per domain, expert usage, samples, and a comparison with transformers, of an exported model.

    python -m scripts.demo.evaluate MODEL_DIR DATA_DIR --out evaluation.json

MODEL_DIR is in the Hugging Face layout (config.json, model.safetensors, tokenizer.json). Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from scripts.demo import data, export
from scripts.demo.model import Compute, ModelConfig, Params, Routing, forward

STOPS = (0, 2)  # <|endoftext|>, <|im_end|>
PROMPTS = (
    "def fibonacci(n: int) -> int:\n",
    "Question: Tom has 5 boxes with 12 pencils each. He gives 15 pencils to his sister. How many pencils does he "
    "have left?\nAnswer:",
    "Once upon a time, in a small village by the sea,",
    "hacker\n n.\n\n",
    "<|im_start|>user\nHi, can I get a latte please?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a python function to find the sum of even numbers in a list.<|im_end|>\n"
    "<|im_start|>assistant\n",
    "public class Stack {\n",
    "ROMEO:\n",
)


class Evaluator:
    """Bits per byte of validation windows under given parameters."""

    def __init__(self, config: ModelConfig, compute: Compute, *, batch: int) -> None:
        self.config, self.batch = config, batch

        def score(params: Params, windows: Array, mask: Array) -> tuple[Array, Routing]:
            logits, routing = forward(params, windows[:, :-1], config, compute)
            picked = jnp.take_along_axis(logits, windows[:, 1:, None], -1)[..., 0]
            return jnp.sum((jax.nn.logsumexp(logits, -1) - picked) * mask, -1), routing

        self.score = jax.jit(score)

    def run(self, params: Params, text: data.ValidationText) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Nats per window, each expert's share of the tokens `[L, E]` over all windows, and window counts."""
        count = len(text.windows)
        nats, shares, sizes = [], [], []
        for start in range(0, count, self.batch):
            index = np.arange(start, start + self.batch) % count  # the last batch is filled up; the surplus is dropped
            losses, routing = self.score(
                params, jnp.asarray(text.windows[index].astype(np.int32)), jnp.asarray(text.mask[index])
            )
            nats.append(np.asarray(losses)[: count - start])
            shares.append(np.asarray(routing.share))
            sizes.append(len(nats[-1]))
        return np.concatenate(nats), np.stack(shares), np.array(sizes)

    def __call__(self, params: Params, text: data.ValidationText, report: list[dict[str, Any]]) -> dict[str, Any]:
        """Bits per byte per source and domain, their mean over domains, the usage of experts."""
        nats, shares, sizes = self.run(params, text)
        per_source = np.bincount(text.source, nats, len(report)) / math.log(2)
        sources = {
            row["name"]: round(float(bits / size), 4)
            for row, bits, size in zip(report, per_source, text.bytes_of_text, strict=True)
            if size
        }
        domains = {}
        for domain in dict.fromkeys(row["domain"] for row in report):
            chosen = [i for i, row in enumerate(report) if row["domain"] == domain and text.bytes_of_text[i]]
            if not chosen:
                continue
            domains[domain] = round(float(per_source[chosen].sum() / text.bytes_of_text[chosen].sum()), 4)
        share = np.average(shares, axis=0, weights=sizes)
        return {
            "mean_bpb": round(float(np.mean(list(domains.values()))), 4),
            "bpb": round(float(per_source.sum() / text.bytes_of_text.sum()), 4),
            "domains": domains,
            "sources": sources,
            "usage_entropy": [round(value, 4) for value in usage_entropy(share)],
            "least_share": [round(float(value), 5) for value in share.min(-1) / self.config.top_k],
            "most_share": [round(float(value), 5) for value in share.max(-1) / self.config.top_k],
        }


def usage_entropy(share: np.ndarray) -> list[float]:
    """Per layer, the entropy of which expert is used, divided by that of even use."""
    p = share / share.sum(-1, keepdims=True)
    return [float(-(row[row > 0] * np.log(row[row > 0])).sum() / math.log(len(row))) for row in p]


def sample(model_dir: Path, new_tokens: int) -> list[dict[str, Any]]:
    """Continuations of `PROMPTS`, greedy and at temperature 0.7, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    samples = []
    for temperature in (0.0, 0.7):
        torch.manual_seed(0)
        how = {"do_sample": True, "temperature": temperature, "top_k": 40} if temperature else {"do_sample": False}
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt")
            with torch.no_grad():
                out = model.generate(**ids, max_new_tokens=new_tokens, **how)[0, ids["input_ids"].shape[1] :].tolist()
            stop = next((i for i, token in enumerate(out) if token in STOPS), len(out))
            text = tokenizer.decode(out[:stop], skip_special_tokens=False)
            samples.append({"prompt": prompt, "temperature": temperature, "text": text, "ended": stop < len(out)})
    return samples


def compare_with_transformers(
    model_dir: Path, config: ModelConfig, params: Params, windows: np.ndarray
) -> dict[str, float]:
    """Largest difference of logits, and both mean losses in nats per token, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    inputs, targets = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
    ours = np.asarray(forward(params, jnp.asarray(inputs, jnp.int32), config, Compute(dtype="float32"))[0])
    with torch.no_grad():
        theirs = model(torch.tensor(inputs)).logits.numpy()

    def loss(logits: np.ndarray) -> float:
        picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
        peak = logits.max(-1)
        return float(np.mean(np.log(np.exp(logits - peak[..., None]).sum(-1)) + peak - picked))

    return {
        "largest_logit_difference": float(np.abs(ours - theirs).max()),
        "largest_logit": float(np.abs(theirs).max()),
        "loss": loss(ours),
        "transformers_loss": loss(theirs),
        "tokens": float(targets.size),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--limit", type=int, help="windows per source (all by default: minutes on a CPU)")
    parser.add_argument("--new-tokens", type=int, default=96)
    args = parser.parse_args()
    config = ModelConfig.from_hf(json.loads((args.model / "config.json").read_text()))
    params = {n: jnp.asarray(v) for n, v in export.read_params(args.model / export.NAME, config).items()}
    text = data.load_validation(args.data, args.length, args.limit)
    evaluator = Evaluator(config, Compute(dtype="float32"), batch=args.batch)
    result = evaluator(params, text, data.read_report(args.data))
    result["validation_tokens"] = int(text.mask.sum())
    result |= {"length": args.length, "windows_per_source": args.limit}
    full = text.windows[text.mask.all(1)]
    result["transformers"] = compare_with_transformers(args.model, config, params, full[:4, :513])
    result["samples"] = sample(args.model, args.new_tokens)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "samples"}, indent=1))
    for row in result["samples"]:
        print(f"--- T={row['temperature']}\n{row['prompt']}⟶{row['text']}")


if __name__ == "__main__":
    main()
