"""Every reader of what comes from outside, with good inputs to spoil."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from seqmoe_jax.checkpoints.resolve import read_config
from seqmoe_jax.checkpoints.safetensors import open_checkpoint
from seqmoe_jax.cli import plot
from seqmoe_jax.forecast import store
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.tensors import weight_shapes
from seqmoe_jax.loading import load_model
from seqmoe_jax.models.families import FAMILIES, spec_from_config
from seqmoe_jax.presets import preset_names, preset_path
from seqmoe_jax.testing import tiny_config
from seqmoe_jax.text import chat_of, open_tokenizer
from seqmoe_jax.text.defaults import eos_token_ids, model_sampling
from seqmoe_jax.traces.first_order import FirstOrder
from seqmoe_jax.traces.forecasts import read_forecasts, write_forecasts
from seqmoe_jax.traces.format import read_trace, write_trace
from seqmoe_jax.traces.prompts import read_prompts
from seqmoe_jax.traces.responses import read_responses
from tests.hostile.harness import Reader
from tests.hostile.mutations import spoiled, spoiled_json
from tests.traces.test_responses import npy_base64

DATA = Path(__file__).parents[1] / "data"
DEMO = store.SHIPPED.parent / "demo"
MESSAGES = [
    {"role": "system", "content": "You are short."},
    {"role": "user", "content": "Hello \U0001f642"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if loop.first and m['role'] == 'system' %}S: {{ m.content | trim }}\n"
    "{% else %}<|{{ m['role'] }}|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}"
    "{% endfor %}<|assistant|>{{ '%d' % ns.n }}{% endif %}"
)
BENCH = {
    "model": "m", "device": "d", "repeats": 3,
    "rows": [
        {"name": name, "residency": 0.3, "batch": 1, "tokens_per_second": 30.0, "spread": [29.0, 31.0], "step_us": 9e2,
         "shares": {"share": {"moe": 0.7, "other": 0.3}, "us_per_step": {"moe": 500.0, "other": 200.0}}}
        for name in ("full", "lru")
    ],
}  # fmt: skip
# Pieces that templates are made of, the dangerous ones first.
PIECES = (
    "{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**9 }}", "{{ range(10**9) | list }}", "{{ 9**9**9 }}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}", "{{ messages | tojson }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}",
    "{{ '%1000000000d' % 1 }}", "{{ 'a'.center(10**9) }}", "{{ strftime_now('%Y' * 99) }}", "{{ x.y.z }}", "{{ 1/0 }}",
    "{% include 'x' %}", "{% break %}", "{% set messages = 3 %}", "{{ messages[0]['content'] * 3 }}", "{%", "}}", "{#",
    "{{ 'x' | indent(10**9) }}", "{{ [1] * 10**8 }}", "{{ '{:>1000000000}'.format(1) }}", "{% generation %}",
    "{% if true %}", "{% endif %}", "{{ joiner }}", "{{ lipsum(n=10**6) }}", "{{ dict(a=1) | items | list }}",
)  # fmt: skip


def readers(work: Path) -> Iterator[Reader]:
    """All of them; they write what they read into the directory `work`."""
    yield Reader(name="config.json", attempt=partial(_config, work / "config"))
    model = tiny_directory(work / "model")
    for name in ("config.json", "a.safetensors", "model.safetensors.index.json"):
        attempt = partial(_file_of, model, work / f"model-{name}", name, _load)
        yield Reader(name=f"a model directory with a spoiled {name}", attempt=attempt, share=0.3)
    yield Reader(name="safetensors header", attempt=partial(_header, model / "a.safetensors", work / "header"))
    yield Reader(
        name="safetensors index",
        attempt=partial(_file_of, model, work / "index", "model.safetensors.index.json", _open),
    )
    text = _text_directory(work / "text")
    for name in ("generation_config.json", "tokenizer_config.json", "added_tokens.json", "chat_template.json"):
        yield Reader(name=name, attempt=partial(_file_of, text, work / f"text-{name}", name, _talk), share=0.2)
    yield Reader(
        name="tokenizer.json",
        attempt=partial(_file_of, text, work / "text-tokenizer", "tokenizer.json", _talk),
        share=0.15,
    )
    yield Reader(name="*.tiktoken", attempt=partial(_tiktoken, work / "tiktoken"), share=0.3)
    yield Reader(name="chat_template.jinja", attempt=partial(_template, work / "template"), share=0.3)
    predictor = _predictor_directory(work / "predictor")
    yield Reader(
        name="predictor directory",
        attempt=partial(_predictor, predictor, work / "predictor-copy"),
    )
    trace = _trace_files(work)
    yield Reader(name="trace npz", attempt=partial(_npz, trace / "t.npz", work / "t.npz", _use_trace))
    yield Reader(
        name="forecasts npz",
        attempt=partial(_npz, trace / "f.npz", work / "f.npz", partial(_use_forecasts, read_trace(trace / "t.npz"))),
        share=0.3,
    )
    yield Reader(name="prompts", attempt=partial(_prompts, work / "p.jsonl"))
    yield Reader(name="answers of vLLM", attempt=partial(_responses, work / "r.jsonl"), share=0.5)
    evaluation = json.loads((store.SHIPPED / "demo" / store.EVALUATION).read_text())
    yield Reader(name="evaluation JSON", attempt=partial(_plot, "_recall", evaluation, work / "e.json"), share=0.1)
    yield Reader(name="benchmark JSON", attempt=partial(_plot, "_bench", BENCH, work / "b.json"), share=0.1)


def _responses(path: Path, draw: Random) -> None:
    routing = [[[1, 0], [2, 3]], [[3, 1], [0, 2]], [[0, 1], [1, 3]]]
    as_npy = draw.random() < 0.5
    choice = {"token_ids": [5, 6], "routed_experts": npy_base64(routing) if as_npy else routing}
    answer = {"choices": [choice], "prompt_token_ids": [3, 4], "split": "train"}
    path.write_bytes(spoiled_json(answer, draw).replace(b"\n", b" ") + b"\n")
    assert read_responses(path, experts=4, model="m").steps > 0


def _config(path: Path, draw: Random) -> None:
    path.mkdir(exist_ok=True)
    config = json.loads(preset_path(draw.choice(preset_names())).read_text())
    if draw.random() < 0.3:
        config["model_type"] = draw.choice(sorted(FAMILIES))
    (path / "config.json").write_bytes(spoiled_json(config, draw))
    spec = spec_from_config(read_config(path))
    assert spec.expert_layout.block_bytes > 0
    assert spec.tensors()


def _file_of(good: Path, copy: Path, name: str, read: Callable[[Path], None], draw: Random) -> None:
    """Reads a directory of which one file is spoiled."""
    copy.mkdir(exist_ok=True)
    for path in good.iterdir():
        if path.name != name and not (copy / path.name).exists():
            shutil.copy(path, copy)
    data = (good / name).read_bytes()
    as_text = name.endswith(".json") and draw.random() < 0.85
    (copy / name).write_bytes(spoiled_json(json.loads(data), draw) if as_text else spoiled(data, draw))
    read(copy)


def _load(directory: Path) -> None:
    load_model(directory)


def _open(directory: Path) -> None:
    open_checkpoint(directory).close()


def tiny_directory(directory: Path) -> Path:
    """A model of two shards, its tensors all zeros."""
    directory.mkdir()
    config = tiny_config(hidden_size=32, head_dim=8, vocab_size=64)
    (directory / "config.json").write_text(json.dumps(config))
    hidden, experts, width = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    tensors = {
        "model.embed_tokens.weight": (64, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (64, hidden),
    }
    for i in range(config["num_hidden_layers"]):
        own = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        own |= {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)}
        own |= {f"self_attn.{name}_proj.weight": (rows, hidden) for name, rows in (("q", 32), ("k", 16), ("v", 16))}
        own |= {"self_attn.o_proj.weight": (hidden, 32)}
        dense = i in config["mlp_only_layers"]
        names = ["mlp"] if dense else [f"mlp.experts.{e}" for e in range(experts)]
        wide = config["intermediate_size"] if dense else width
        for name in names:
            own |= {f"{name}.gate_proj.weight": (wide, hidden), f"{name}.up_proj.weight": (wide, hidden)}
            own |= {f"{name}.down_proj.weight": (hidden, wide)}
        if not dense:
            own |= {"mlp.gate.weight": (experts, hidden)}
        tensors |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    half = len(arrays) // 2
    parts = {"a.safetensors": dict(list(arrays.items())[:half]), "b.safetensors": dict(list(arrays.items())[half:])}
    for name, part in parts.items():
        save_file(part, directory / name)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def _header(good: Path, path: Path, draw: Random) -> None:
    """A header whose JSON is spoiled and whose length fits it, over the same data."""
    path.mkdir(exist_ok=True)
    data = good.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = spoiled_json(json.loads(data[8 : 8 + size]), draw)
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    _open(path)


def _text_directory(directory: Path) -> Path:
    directory.mkdir()
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(DEMO / name, directory)
    files: dict[str, Any] = {
        "generation_config.json": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05,
                                   "eos_token_id": [0, 3], "bos_token_id": 0, "max_new_tokens": 2048},
        "added_tokens.json": {"<|a|>": 6000, "<|b|>": 6001},
        "chat_template.json": {"chat_template": TEMPLATE},
        "tokenizer_config.json": {
            "add_bos_token": True, "bos_token": {"content": "<|endoftext|>", "special": True}, "eos_token": "<|end|>",
            "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True, "lstrip": False}},
            "chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TEMPLATE}],
            "model_max_length": 4096, "extra_special_tokens": {"x": "<|x|>"},
        },
    }  # fmt: skip
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value))
    return directory


def _talk(directory: Path) -> None:
    """All that is done with the text files of a model before and after generation."""
    eos_token_ids(directory, "qwen3_moe")
    model_sampling(directory)
    tokenizer = open_tokenizer(directory, "qwen3_moe")
    prompt = "Hello \U0001f642 <|endoftext|>"
    if (chat := chat_of(directory, "qwen3_moe")) is not None:
        prompt += chat.prompt(MESSAGES)[:2000]
    tokens = tokenizer.encode(prompt)
    tokenizer.decode([token for token in tokens if token < tokenizer.vocab])


def _tiktoken(directory: Path, draw: Random) -> None:
    directory.mkdir(exist_ok=True)
    family, name = draw.choice((("qwen3_5_moe", "qwen3_6-2000"), ("gpt_oss", "o200k_base-2000")))
    (directory / "x.tiktoken").write_bytes(spoiled((DATA / f"{name}.tiktoken").read_bytes(), draw))
    tokenizer = open_tokenizer(directory, family)
    tokenizer.decode(tokenizer.encode("Hello \U0001f642 <|endoftext|>"))


def _template(directory: Path, draw: Random) -> None:
    directory.mkdir(exist_ok=True)
    text = TEMPLATE
    for _ in range(draw.choice((1, 1, 2, 3))):
        at = draw.choice((0, len(text), draw.randrange(len(text) + 1)))
        text = text[:at] + draw.choice(PIECES) + text[at:]
    data = text.encode()
    (directory / "chat_template.jinja").write_bytes(spoiled(data, draw) if draw.random() < 0.5 else data)
    chat = chat_of(directory, "qwen3_moe")
    assert chat is not None
    chat.prompt(MESSAGES)


def _predictor_directory(directory: Path) -> Path:
    config = PredictorConfig(
        model="some/model", layers=2, experts=4, active=2, d_model=8, blocks=2, head_dim=8, d_state=4, vocabulary=20,
        token_rows=70, token_width=4, echo=8, refine_width=8,
    )  # fmt: skip
    directory.mkdir()
    weights: dict[str, Any] = {"blocks": [{}, {}]}
    for name, shape in weight_shapes(config).items():
        *block, own = name.split(".")
        (weights["blocks"][int(block[1])] if block else weights)[own] = np.full(shape, 0.5, np.float32)
    store.save(directory, config, weights, np.arange(20), part_bytes=2000)
    return directory


def _predictor(good: Path, copy: Path, draw: Random) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(good, copy)
    path = draw.choice(sorted(copy.glob("*.safetensors")))
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    kind = draw.random()
    if kind < 0.4:
        text = spoiled_json(json.loads(header["__metadata__"]["seqmoe_predictor"]), draw)
        header["__metadata__"]["seqmoe_predictor"] = text.decode("utf-8", "replace")
        changed = json.dumps(header).encode()
    else:
        changed = spoiled_json(header, draw)
    whole = len(changed).to_bytes(8, "little") + changed + data[8 + size :]
    path.write_bytes(whole if kind < 0.7 else spoiled(data, draw))
    store.read_config(copy)
    store.load(copy)


def _trace_files(work: Path) -> Path:
    directory = work / "good"
    directory.mkdir()
    trace = read_trace(DATA / "gptoss20b_excerpt.npz").take(np.arange(2))
    trace = dataclasses.replace(trace, prefill_lens=np.array([1, 2]))
    write_trace(directory / "t.npz", trace)
    forecasts = FirstOrder.fit(trace).forecasts(trace, rollout=1)
    write_forecasts(directory / "f.npz", dataclasses.replace(forecasts, trigger=12, refined=forecasts.next))
    return directory


def _npz(good: Path, path: Path, use: Callable[[Path], None], draw: Random) -> None:
    """Damaged bytes, or a good archive of spoiled arrays."""
    if draw.random() < 0.5:
        path.write_bytes(spoiled(good.read_bytes(), draw))
    else:
        with np.load(good) as archive:
            arrays = dict(archive)
        for _ in range(draw.choice((1, 1, 2))):
            name = draw.choice(sorted(arrays))
            arrays[name] = _spoiled_array(arrays[name], draw)
        if draw.random() < 0.1:
            del arrays[draw.choice(sorted(arrays))]
        (np.savez_compressed if draw.random() < 0.5 else np.savez)(path, **arrays)
    use(path)


def _spoiled_array(array: np.ndarray, draw: Random) -> np.ndarray:
    kind = draw.randrange(7)
    if array.dtype == object:
        return array
    if kind == 0:
        kinds = ("U5", "S3") if array.dtype.kind in "US" else ("i1", "u1", "i4", "u8", ">i4", "f4", "f8", "U5", "?")
        return array.astype(draw.choice(kinds))
    if kind == 1:
        return array.reshape(-1) if array.ndim != 1 else array.reshape(1, -1)
    if kind == 2:
        return array[:0] if array.ndim else np.array([array, array])
    if kind == 3:
        return np.array(draw.choice((0, -1, 2**31, 10**15, 2**62, 0.5, "x", "")))
    if kind == 4:
        return np.array([draw.choice((None, {}, "x"))], object)
    flat = array.copy().reshape(-1)
    if flat.size and array.dtype.kind in "iuf":
        high = np.iinfo(array.dtype).max if array.dtype.kind in "iu" else draw.choice((np.nan, np.inf, -1.0, 3.0))
        flat[draw.randrange(flat.size)] = draw.choice((0, 1, high))
    return flat.reshape(array.shape)


def _use_trace(path: Path) -> None:
    trace = read_trace(path)
    trace.activations(0, 5)
    trace.weights(0, 5)
    trace.without_prompts()
    trace.take(np.arange(1))
    assert trace.model is None or isinstance(trace.model, str)


def _use_forecasts(trace: Any, path: Path) -> None:
    read_forecasts(path, trace).take(np.arange(3))


def _prompts(path: Path, draw: Random) -> None:
    rows = [
        {"prompt": "Hello\nyou", "split": "train", "temperature": 0.5},
        {"prompt": "\U0001f642", "split": "test"},
    ]
    lines = [json.dumps(row).encode() for row in rows]
    lines[draw.randrange(2)] = spoiled_json(draw.choice(rows), draw)
    data = b"\n".join(lines)
    path.write_bytes(spoiled(data, draw) if draw.random() < 0.2 else data)
    read_prompts(path)


def _plot(kind: str, good: dict[str, Any], path: Path, draw: Random) -> None:
    path.write_bytes(spoiled_json(good, draw))
    getattr(plot, kind)(argparse.Namespace(evaluation=path, result=path, split=None))
