"""The same weights in other files: names, heads, dtypes, shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from directories import Variant, read_config, write_config
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
FILE = "model.safetensors"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SAID: dict[str, dict[str, Any]] = {
    "no dtype": {}, "null": {"dtype": None}, "dtype bfloat16": {"dtype": "bfloat16"},
    "torch_dtype bfloat16": {"torch_dtype": "bfloat16"}, "dtype float32": {"dtype": "float32"},
    "torch_dtype float16": {"torch_dtype": "float16"},
    "both": {"dtype": "float32", "torch_dtype": "bfloat16"},
}  # fmt: skip


def variants(family: str, directory: Path) -> Iterator[Variant]:
    def variant(axis: str, name: str, *writes: Callable[[Path], object]) -> Variant:
        def write(directory: Path) -> None:
            for one in writes:
                one(directory)

        return Variant(family=family, axis=axis, name=name, write=write)

    for kind in DTYPES:
        for said, fields in SAID.items():
            yield variant("dtype", f"{kind} stored, {said}", stored(kind), says(fields))
    yield variant("dtype", "experts alone in float32", stored(torch.float32, ".experts."))
    yield variant("dtype", "a single expert in float32", stored(torch.float32, ".0."))
    yield variant("dtype", "all but the experts in float32", stored(torch.float32, "norm", "embed", "attn", "head"))
    yield variant("dtype", "float64", stored(torch.float64))
    for tied in (False, True):
        for own in ("own", "equal", "none", "instead"):
            yield variant("head", f"tied {tied}, head {own}", head(own), says({"tie_word_embeddings": tied}, ()))
    yield variant("names", "as transformers 5 has them", resaved)
    yield variant("names", "of the decoder alone", bare)
    yield variant("names", "of the decoder alone, tied", bare, says({"tie_word_embeddings": True}, ()))
    yield variant("names", "of the decoder alone, head beside", bare_with_head)
    yield variant(
        "names", "of a model that sees too", renamed(lambda name: name.replace("model.", "model.language_model.", 1))
    )
    yield variant("names", "with buffers of old files", with_buffers)
    yield variant("shards", "in three", sharded)
    yield variant("shards", "in three, as transformers 5 has them", resaved, sharded)


def says(fields: dict[str, Any], gone: tuple[str, ...] = ("dtype", "torch_dtype")) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        config = {name: value for name, value in read_config(directory).items() if name not in gone}
        write_config(directory, config | fields)

    return write


def changed(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        tensors = change(load_file(directory / FILE))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / FILE, {"format": "pt"})

    return write


def renamed(rename: Callable[[str], str]) -> Callable[[Path], None]:
    return changed(lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})


def stored(dtype: torch.dtype, *which: str) -> Callable[[Path], None]:
    """In another dtype, with digits that only this one holds. `which`: parts of the names of those that are."""

    def change(tensors: Tensors) -> Tensors:
        generator = torch.Generator().manual_seed(3)
        return {name: _digits(tensor, dtype, generator) if not which or any(part in name for part in which) else tensor
                for name, tensor in tensors.items()}  # fmt: skip

    return changed(change)


def _digits(tensor: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    noise = 1 + 3e-3 * torch.randn(tensor.shape, generator=generator)
    # float64 is not read by float32 arithmetic in any other way than rounded to it.
    return (tensor.float() * noise).to(dtype)


def head(own: str) -> Callable[[Path], None]:
    def change(tensors: Tensors) -> Tensors:
        embed = next(name for name in tensors if name.endswith("embed_tokens.weight"))
        name = next((name for name in tensors if name.endswith("head.weight")), "lm_head.weight")
        if own == "equal":
            return tensors | {name: tensors[embed].clone()}
        if own == "own":
            generator = torch.Generator().manual_seed(5)
            noise = torch.randn(tensors[embed].shape, generator=generator) * 0.2
            return tensors | {name: noise.to(tensors[embed].dtype)}
        tensors = {key: value for key, value in tensors.items() if key != name}
        if own == "instead":
            tensors[name] = tensors.pop(embed)
        return tensors

    return changed(change)


def resaved(directory: Path) -> None:
    """Read by transformers and saved in the names of its own classes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    model.save_pretrained(directory, save_original_format=False)


def bare(directory: Path) -> None:
    """The decoder without its head, as a base class saves it."""
    model = transformers.AutoModel.from_pretrained(directory, dtype="auto")
    kept = (directory / "config.json").read_text()
    model.save_pretrained(directory)
    (directory / "config.json").write_text(kept)


def bare_with_head(directory: Path) -> None:
    tensors = load_file(directory / FILE)
    found = {name: tensor for name, tensor in tensors.items() if name.endswith("head.weight")}
    bare(directory)
    changed(lambda tensors: tensors | found)(directory)


def with_buffers(directory: Path) -> None:
    changed(lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})(directory)


def sharded(directory: Path) -> None:
    tensors = load_file(directory / FILE)
    (directory / FILE).unlink()
    places = {}
    for index in range(3):
        file = f"model-{index + 1:05}-of-00003.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[index::3]}
        save_file(part, directory / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (directory / f"{FILE}.index.json").write_text(json.dumps(index))
