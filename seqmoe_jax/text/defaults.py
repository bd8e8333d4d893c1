"""What a model's own files ask of generation: its end tokens and how its makers sample it."""

from __future__ import annotations

from pathlib import Path

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.fields import Fields
from seqmoe_jax.inputs import read_json
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.text import harmony

MAX_TOKEN = (1 << 31) - 1


def eos_token_ids(directory: Path, family: str = "") -> tuple[int, ...]:
    """`eos_token_id` of `generation_config.json`, else `config.json`: an id, a list, or none. Raises `ConfigError`.

    GPT-OSS (`family` "gpt_oss") ends a reply where it returns and where it calls a tool, but its first files list only
    one of these.
    """
    known = harmony.EOS_TOKEN_IDS if family == "gpt_oss" else ()
    for name in ("generation_config.json", "config.json"):
        if not (directory / name).is_file():
            continue
        found = read_json(directory / name)
        value = found.get("eos_token_id")
        fields = Fields(found | {"eos_token_id": value if isinstance(value, list) else [value]}, str(directory / name))
        if value is not None:
            # -1 is how some files say that there is none; no token has it.
            values = fields.ints("eos_token_id", within=(-1, MAX_TOKEN))
            return (*values, *(token for token in known if token not in values))
    return known


def model_sampling(directory: Path) -> SamplingConfig:
    """How `generation_config.json` says to sample: `temperature`, `top_k`, `top_p`, `min_p` where `do_sample` is true.

    Greedy where the file is missing or says `do_sample` false or nothing. A number that it leaves out has no effect
    (temperature 1, no filter); transformers would put top_k 50 there. Raises `ConfigError`.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return SamplingConfig()
    fields = Fields(read_json(path), str(path))
    if not fields.flag("do_sample", False):
        return SamplingConfig()
    try:
        return SamplingConfig(
            temperature=fields.number("temperature", 1.0),
            top_k=int(fields.number("top_k", 0, most=MAX_TOKEN)),
            top_p=fields.number("top_p", 1.0),
            min_p=fields.number("min_p", 0.0),
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
