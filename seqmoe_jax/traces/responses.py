"""Traces from what vLLM's server answers with `--enable-return-routed-experts`.

A file has one answer of `/v1/completions` or `/v1/chat/completions` per line, asked for with `return_token_ids`; it may
say `split` too. What is read of it (vLLM 0.21 and later):

| field | shape | meaning |
|---|---|---|
| `choices[i].routed_experts` | T L K | experts of each token, the heaviest first; the last token may be missing |
| `prompt_routed_experts` | P L K | of the prompt's tokens, where `choices[i].routed_experts` begins after them |
| `choices[i].token_ids` | - | the tokens of the answer |
| `prompt_token_ids` | P | the tokens of the prompt, beside `choices` or in a choice |

Routing is lists, or an `.npy` file in base64. Weights of the experts are not in it: all K get equal ones.
"""

from __future__ import annotations

import base64
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from seqmoe_jax.errors import TraceError
from seqmoe_jax.fields import Fields, shown
from seqmoe_jax.inputs import check_file, parse_json
from seqmoe_jax.traces.archive import array_of
from seqmoe_jax.traces.format import Trace
from seqmoe_jax.traces.validation import check_arrays, check_headers

MAX_LINE = 1 << 28  # bytes of an answer
MAX_TOKEN = 1 << 24
UNKNOWN = -1  # routing of a token that came from vLLM's prefix cache

Routing = Integer[np.ndarray, "T L K"]


def read_responses(path: str | os.PathLike[str], *, experts: int, model: str) -> Trace:
    """The trace of a file of answers: a sequence for every choice, of its prompt's tokens and of those decoded.

    `experts` is E, which is not in the answers. A prompt's first tokens whose routing is not known are left out, and so
    are layers that route nothing (dense ones, all zeros). Raises `TraceError`, which names the line.
    """
    check_file(path, "a file of answers", TraceError)
    sequences = [each for line in _lines(Path(path)) for each in line]
    if not sequences:
        raise TraceError(f"{path} has no answers: expected a JSON object per line, as vLLM's server returns them")
    splits = {split is None for *_, split in sequences}
    if len(splits) > 1:
        raise TraceError(f"{path}: either every answer has a 'split' or none has")
    shapes = {ids.shape[1:] for ids, *_ in sequences}
    if len(shapes) > 1:
        raise TraceError(f"{path}: expected answers of one model, got routing of {' and '.join(map(str, shapes))}")
    ids = np.concatenate([ids for ids, *_ in sequences])
    layers = np.flatnonzero(ids.any(axis=(0, 2))) if ids.shape[2] > 1 else np.arange(ids.shape[1])
    lens = np.array([len(each) for each, *_ in sequences], np.int64)
    arrays: dict[str, Any] = {
        # What no trace can hold is left as it is, for the checks to name.
        "ids": ids[:, layers].astype(_dtype(ids, experts)),
        "probs_u8": np.full((len(ids), len(layers), ids.shape[2]), round(255 / ids.shape[2]), np.uint8),
        "tok": np.concatenate([tokens for _, tokens, *_ in sequences]),
        "lens": lens,
        "seq_offsets": np.concatenate([[0], np.cumsum(lens)]),
        "num_experts": np.int32(experts),
        "layer_index": layers,
        "prefill_lens": np.array([prompt for *_, prompt, _ in sequences], np.int64),
    }
    if splits == {False}:
        arrays["split"] = np.array([split for *_, split in sequences])
    try:
        check_headers(arrays)
        check_arrays(arrays)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    return Trace(**arrays | {"num_experts": experts}, metadata={"model": np.array(model)})


Sequence = tuple[Routing, np.ndarray, int, str | None]  # routing, tokens, how many are the prompt's, split


def _lines(path: Path) -> Iterator[list[Sequence]]:
    """The sequences of each line."""
    with open(path, "rb") as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE + 1)
            if not line:
                return
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE:
                raise TraceError(f"{where}: expected an answer of at most {MAX_LINE} bytes, got more")
            if line.strip():
                yield _answer(line, where)


def _answer(line: bytes, where: str) -> list[Sequence]:
    answer = parse_json(line, where, error=TraceError)
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        raise TraceError(f"{where}: expected an answer of vLLM's server with 'choices', got {shown(answer)}")
    split = Fields(answer, where, error=TraceError).text("split", None, least=1, most=100)
    return [
        (*_choice(choice, answer, f"{where}, choice {index}"), split) for index, choice in enumerate(answer["choices"])
    ]


def _choice(choice: Any, answer: Mapping[str, Any], where: str) -> tuple[Routing, np.ndarray, int]:
    """Routing and tokens of a sequence, and how many of them are its prompt's."""
    if not isinstance(choice, dict):
        raise TraceError(f"{where}: expected an object, got {shown(choice)}")
    prompt = _tokens({**answer, **choice}, "prompt_token_ids", where)
    tokens = np.concatenate([prompt, _tokens(choice, "token_ids", where)])
    routing = _routing(choice, "routed_experts", where)
    before = len(prompt)
    if answer.get("prompt_routed_experts") is not None:
        first = _routing(answer, "prompt_routed_experts", where)
        if first.shape[1:] != routing.shape[1:]:
            raise TraceError(f"{where}: prompt_routed_experts has shape {first.shape}, routed_experts {routing.shape}")
        routing = np.concatenate([first, routing])
    if len(routing) not in (len(tokens) - 1, len(tokens)):
        raise TraceError(
            f"{where}: expected the routing of {len(tokens) - 1} or {len(tokens)} tokens ({before} of the prompt), got "
            f"that of {len(routing)}"
        )
    unknown = (routing == UNKNOWN).any(axis=(1, 2))
    skipped = int(np.argmin(unknown)) if not unknown.all() else len(unknown)
    if skipped > before or unknown[skipped:].any():
        raise TraceError(f"{where}: the routing of a decoded token is not known (-1)")
    if len(routing) - before < 1:
        raise TraceError(f"{where}: expected at least one decoded token with routing, got none")
    return routing[skipped:], tokens[skipped : len(routing)].astype(np.int32), before - skipped


def _tokens(said: Mapping[str, Any], name: str, where: str) -> np.ndarray:
    ids = said.get(name)
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < MAX_TOKEN for token in ids):
        raise TraceError(
            f"{where}: expected {name}, a list of tokens, got {shown(ids)}; ask with return_token_ids: true"
        )
    return np.array(ids, np.int64)


def _routing(said: Mapping[str, Any], name: str, where: str) -> Routing:
    value = said.get(name)
    if value is None:
        raise TraceError(f"{where}: expected {name}, got none; serve with --enable-return-routed-experts")
    try:
        array = array_of(base64.b64decode(value, validate=True), name) if isinstance(value, str) else np.array(value)
    except Exception as error:  # over damaged bytes and lists of lists NumPy raises whatever comes
        reason = " ".join(str(error).split())[:100]
        raise TraceError(f"{where}: expected {name}, lists or an npy file in base64, got neither ({reason})") from None
    if array.ndim != 3 or array.dtype.kind not in "iu" or 0 in array.shape[1:]:
        raise TraceError(
            f"{where}: expected {name} to be whole numbers of shape (tokens, layers, active experts), got "
            f"{array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64)


def _dtype(ids: Routing, experts: int) -> Any:
    if ids.size and (ids.min() < 0 or ids.max() > 65535):
        raise TraceError(f"expected expert ids from 0 to {experts - 1}, got {ids.min()} to {ids.max()}")
    return np.uint8 if experts <= 256 and ids.max() < 256 else np.uint16
