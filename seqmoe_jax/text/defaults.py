"""What a model's own files ask of generation: its end tokens and how its makers sample it.

Both are read as transformers' `generate` reads them: from `generation_config.json` alone where it is there, else from
`config.json` and what that leaves open from its `text_config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.fields import Fields
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.text import harmony
from seqmoe_jax.text.tokenizer_files import read_if_there

MAX_TOKEN = (1 << 31) - 1
_TOP_K = 50  # transformers' own, where a file that asks for sampling gives none
# What changes tokens and is not done here, and the JSON of its values that ask for nothing. The last ones count where
# tokens are drawn.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,), "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "bad_words_ids": ([],), "force_words_ids": ([],), "constraints": ([],),
    "sequence_bias": ({}, []), "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "exponential_decay_length_penalty": (), "min_length": (0,), "min_new_tokens": (0,),
    "guidance_scale": (1,), "num_beams": (1,), "num_return_sequences": (1,), "penalty_alpha": (0,), "dola_layers": (),
    "watermarking_config": (), "token_healing": (False,), "stop_strings": ([],), "max_time": (),
}  # fmt: skip
_NEUTRAL_DRAWN: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": (1,),
}  # fmt: skip


def eos_token_ids(directory: Path, family: str = "") -> tuple[int, ...]:
    """`eos_token_id`: an id, a list, or none. Raises `ConfigError`.

    GPT-OSS (`family` "gpt_oss") ends a reply where it returns and where it calls a tool, but its first files list only
    one of these.
    """
    known = harmony.EOS_TOKEN_IDS if family == "gpt_oss" else ()
    found, where = _generation_fields(directory)
    value = found.get("eos_token_id")
    if value is None:
        return known
    fields = Fields({"eos_token_id": value if isinstance(value, list) else [value]}, str(where))
    # -1 is how some files say that there is none; no token has it.
    values = fields.ints("eos_token_id", within=(-1, MAX_TOKEN))
    return (*values, *(token for token in known if token not in values))


def model_sampling(directory: Path) -> SamplingConfig:
    """How the model's makers sample it: `temperature`, `top_k`, `top_p`, `min_p` where `do_sample` is true.

    Where it is not, they choose greedily. Raises `ConfigError` for what is not supported and would change tokens, such
    as a `repetition_penalty`.
    """
    found, where = _generation_fields(directory)
    fields = Fields(found, str(where))
    drawn = fields.flag("do_sample", False)
    for name, neutral in {**_NEUTRAL, **(_NEUTRAL_DRAWN if drawn else {})}.items():
        value = found.get(name)
        if value is not None and value not in neutral:
            raise ConfigError(
                f"{where}: {name} {json.dumps(value)[:40]} is not supported; sample otherwise (sampling='greedy', or "
                "numbers such as temperature=0.7 and top_p=0.8 over it), or take it out of the file"
            )
    if not drawn:
        return SamplingConfig()
    try:
        return SamplingConfig(
            temperature=fields.number("temperature", 1.0),
            top_k=max(0, int(fields.number("top_k", _TOP_K, most=MAX_TOKEN))),  # -1 is off, as elsewhere
            top_p=fields.number("top_p", 1.0),
            min_p=fields.number("min_p", 0.0),
        )
    except ConfigError as error:
        raise error if str(error).startswith(str(where)) else ConfigError(f"{where}: {error}") from None


def _generation_fields(directory: Path) -> tuple[dict[str, Any], Path]:
    """What counts for generation, and the file that says so."""
    path = directory / "generation_config.json"
    if path.exists():
        return read_if_there(path), path
    path = directory / "config.json"
    outer = read_if_there(path)
    inner = Fields(outer, str(path)).group("text_config").values
    return {**inner, **{name: value for name, value in outer.items() if value is not None or name not in inner}}, path
