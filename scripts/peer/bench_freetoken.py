"""Decode speed of FreeToken 0.1.2 on the work of `seqmoe bench`: same shape, same routing, same rows of the trace.

    python scripts/peer/bench_freetoken.py --replay T.npz --split test --residency 1.0 0.45 0.25 \
        --steps 256 --repeats 3 --out peer.json

Needs Python 3.12 with torch 2.11 (CUDA), triton 3.6, transformers 5.5 or newer, numpy and safetensors; nothing of
seqmoe_jax and no network. The peer itself is four wheels, installed with `pip install --no-deps`:
freetoken==0.1.2, flashlib==0.3.0, apache-tvm-ffi==0.1.13.post3, pyzmq==27.3.0 (5.7 MB, for cp312 on x86_64).

With `--prompts 4000 16000` also the time to the first token of prompts so long: that of LEAD tokens, less all but the
first of them at the peer's own speed.

Weights are random bfloat16, every expert in pinned host memory, as its own loader has them. Each residency is a process
that loads once. A run is timed twice, over `steps + LEAD` new tokens and over LEAD, and the difference is of `steps`
decode steps alone, those that `seqmoe bench --steps ... --repeats ...` replays in its run of the same number.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

LONG = 200  # steps that a sequence must have, as in seqmoe_jax.bench.replayed
LEAD = 8  # new tokens of the run that is subtracted
PROMPT = 128  # tokens
PRESET = Path(__file__).resolve().parents[2] / "configs" / "qwen3-moe-24x32.json"


def replayed_rows(path: Path, split: str | None, steps: int, *, least: int = LONG) -> np.ndarray:
    """int32 [steps, L, K]: the trace's sequences of at least `least` steps, back to back."""
    with np.load(path, allow_pickle=False) as trace:
        chosen = trace["lens"] >= least
        if split is not None:
            chosen &= trace["split"] == split
        starts, ids = trace["seq_offsets"][:-1], trace["ids"]
        parts = [ids[start : start + n] for start, n in zip(starts[chosen], trace["lens"][chosen], strict=True)]
    if not parts:
        raise SystemExit(f"bench_freetoken: no sequence of split {split} in {path} has {least} steps")
    return np.concatenate(parts)[:steps].astype(np.int32)


def write_checkpoint(directory: Path, config: dict[str, Any]) -> None:
    """A Qwen3-MoE checkpoint without weights: its config, and a tokenizer of as many words as there are ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    (directory / "config.json").write_text(json.dumps(config | {"dtype": config["torch_dtype"]}))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1", pad_token="w1")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(directory)


def load_peer(directory: Path, slots: int, replay: np.ndarray, longest: int) -> tuple[Any, Any]:
    """The engine with `slots` slots and forced routing, and the device counter of the row to replay next.

    longest: positions that a sequence may have.
    """
    import freetoken.layers.moe as layers
    import freetoken.models.weight as weights
    import torch
    from freetoken.kernel.pinned import alloc_pinned_tensor
    from freetoken.llm import LLM

    count, state = replay.shape[1], dict[str, Any]()

    def random_banks(config: Any, *, dtype: Any) -> tuple[list[Any], list[Any]]:
        # Its own has every layer drawn on the CPU and copied once more; here the layers share one random draw.
        state["ids"] = torch.from_numpy(replay).to("cuda")
        state["row"] = torch.zeros(1, dtype=torch.int64, device="cuda")

        def bank(*shape: int) -> list[Any]:
            drawn = torch.randn(*shape, device="cuda", dtype=dtype).mul_(shape[-1] ** -0.5)
            banks = [alloc_pinned_tensor(*shape, dtype=dtype) for _ in range(count)]
            for each in banks:
                each.copy_(drawn)
            return banks

        experts, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        return bank(experts, 2 * width, hidden), bank(experts, hidden, width)

    def decode_forward(layer: Any, hidden: Any, router_logits: Any = None) -> Any:
        # Read at a counter in device memory, so that it can be part of the CUDA graph.
        row = state["row"] % replay.shape[0]
        ids = state["ids"][:, layer.layer_id].index_select(0, row).expand(hidden.shape[0], -1).contiguous()
        shares = torch.full(ids.shape, 1.0 / ids.shape[1], dtype=torch.float32, device="cuda")
        if layer.layer_id == count - 1:
            state["row"] += 1
        return layer._decode_routed(hidden, shares, ids)

    weights.dummy_moe_expert_sources = random_banks
    layers.OffloadMoELayer.decode_forward = decode_forward
    llm = LLM(
        str(directory), use_dummy_weight=True, moe_backend="offload", moe_cache_size=slots, moe_collect_stats=True,
        max_running_req=1, cuda_graph_bs=[1], num_page_override=max(16384, longest), max_seq_len_override=longest,
        attention_backend="triton", cache_type="naive",
    )  # fmt: skip
    return llm, state["row"]


def measure(
    directory: Path, replay: np.ndarray, experts: int, residency: float, args: argparse.Namespace
) -> dict[str, Any]:
    """One row: medians of `repeats` runs after one that warms up."""
    import torch
    from freetoken.core import SamplingParams

    begun = time.perf_counter()
    slots = int(residency * replay.shape[1] * experts)
    longest = max([4096, *(length + 2 * args.steps for length in args.prompts)])
    llm, row = load_peer(directory, slots, replay, longest)
    cache, loaded = llm.engine.moe_offload_cache, time.perf_counter() - begun

    def run(new: int, first_row: int, prompt: int = PROMPT) -> float:
        row.fill_(first_row)
        cache.reset_stats()
        torch.cuda.synchronize()
        started = time.perf_counter()
        llm.generate([[2 + i % 4000 for i in range(prompt)]], SamplingParams(max_tokens=new, ignore_eos=True))
        torch.cuda.synchronize()
        return time.perf_counter() - started

    run(args.steps + 1, 0)
    speeds, misses, short = [], [], []
    for repeat in range(1, args.repeats + 1):
        # Both begin with the same LEAD - 1 rows, so that those after them are the rows of this repeat.
        first_row = repeat * args.steps - (LEAD - 1)
        short.append(run(LEAD, first_row))
        speeds.append(args.steps / (run(args.steps + LEAD, first_row) - short[-1]))
        misses.append(cache.decode_miss_stats())
    prompts = []
    for prompt in args.prompts:
        run(LEAD, 0, prompt)
        times = [run(LEAD, 0, prompt) - (LEAD - 1) / statistics.median(speeds) for _ in range(args.repeats)]
        prompts.append({"tokens": prompt, "ttft_s": statistics.median(times), "spread": [min(times), max(times)]})
    return {
        "residency": slots / (replay.shape[1] * experts),
        "slots": slots,
        "tokens_per_second": statistics.median(speeds),
        "spread": [min(speeds), max(speeds)],
        "miss_rate": statistics.median(stats["miss_rate"] for stats in misses),
        "loaded_per_step": replay.shape[1] * statistics.median(stats["missing_per_layer"] for stats in misses),
        "prompt_and_first_tokens_s": statistics.median(short),
        "prompts": prompts,
        "load_s": round(loaded, 1),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--replay", type=Path, required=True, metavar="T.npz")
    add("--split")
    add("--config", type=Path, default=PRESET, help="of the Qwen3-MoE shape (default: configs/qwen3-moe-24x32.json)")
    add("--residency", type=float, nargs="+", default=[1.0, 0.45, 0.25])
    add("--steps", type=int, default=256)
    add("--repeats", type=int, default=3)
    add("--prompts", type=int, nargs="*", default=[], metavar="TOKENS", help="also time the first token of these")
    add("--limit", type=float, default=120.0, metavar="S", help="seconds for one residency (default: 120)")
    add("--out", type=Path, metavar="FILE.json", help="written after every row")
    add("--one", type=Path, help=argparse.SUPPRESS)  # the directory in which a child measures one residency
    args = parser.parse_args()
    config = json.loads(args.config.read_text())
    shape = config["num_hidden_layers"], config["num_experts_per_tok"]
    if args.one is not None:
        replay = np.load(args.one / "replay.npy")
        row = measure(args.one, replay, config["num_experts"], args.residency[0], args)
        (args.one / "row.json").write_text(json.dumps(row))
        return 0
    replay = replayed_rows(args.replay, args.split, args.steps * (args.repeats + 1))
    if replay.shape[1:] != shape or int(replay.max()) >= config["num_experts"]:
        raise SystemExit(f"bench_freetoken: the trace has (layers, active) {replay.shape[1:]}, the config {shape}")
    # Positions beyond those that the preset names; it rotates by angles, not by a table.
    config |= {"max_position_embeddings": max([config["max_position_embeddings"], *(n + 4096 for n in args.prompts)])}
    result: dict[str, Any] = {"peer": "freetoken 0.1.2", "config": args.config.name, "steps": args.steps, "rows": []}
    with tempfile.TemporaryDirectory(prefix="freetoken-") as temporary:
        directory = Path(temporary)
        write_checkpoint(directory, config)
        np.save(directory / "replay.npy", replay)
        given = ["--replay", args.replay, "--config", args.config, "--steps", args.steps, "--repeats", args.repeats]
        given += ["--prompts", *args.prompts]
        for residency in args.residency:
            words = [sys.executable, __file__, *given, "--one", directory, "--residency", residency]
            written = directory / "row.json"
            written.unlink(missing_ok=True)
            try:
                done = subprocess.run([*map(str, words)], timeout=args.limit, capture_output=True, text=True)
                fault = done.stderr[-2000:]
            except subprocess.TimeoutExpired:
                fault = f"took longer than {args.limit:.0f} s"
            row = json.loads(written.read_text()) if written.exists() else {"residency": residency, "error": fault}
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1))
    return 1 if any("error" in row for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
