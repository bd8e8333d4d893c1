"""A Tunix-style Qwen3-MoE of a preset's shape at one residency: as our engine, by `from_nnx`, and offloaded in place.

python -m scripts.checks.zoo [PRESET] [--layers N] [--residency .45] [--new 256] [--prompt 64]

Random bfloat16 weights; each way decodes greedily, once to compile and once to be timed. The tokens of `from_nnx` are
compared with those of the same module with every expert resident, and those of the model offloaded in place with both.
The last line is JSON: tokens per second, of the drop-in by its own jitted step from Python.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

import seqmoe_jax as sm
from scripts.checks.residencies import cut
from seqmoe_jax.api import Engine
from seqmoe_jax.engine import TokenEngine
from seqmoe_jax.loading import random_model
from seqmoe_jax.options import EngineOptions
from seqmoe_jax.text import TokenIds

ZOO: Any = importlib.import_module("tests.zoo.models")


def module_of(config: dict[str, Any]) -> Any:
    """The module, its arrays in host memory: each is one draw, rolled by a number of its own."""
    fields = ZOO.TunixConfig(
        num_layers=config["num_hidden_layers"], vocab_size=config["vocab_size"], embed_dim=config["hidden_size"],
        hidden_dim=config["moe_intermediate_size"], num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"], num_kv_heads=config["num_key_value_heads"], num_experts=config["num_experts"],
        num_experts_per_tok=config["num_experts_per_tok"], dtype=jnp.bfloat16,
    )  # fmt: skip
    module = nnx.eval_shape(lambda: ZOO.Qwen3(fields, rngs=nnx.Rngs(0)))
    draws: dict[tuple[int, ...], np.ndarray] = {}
    rng = np.random.default_rng(0)
    for _, variable in nnx.iter_graph(module):
        if not isinstance(variable, nnx.Param):
            continue
        shape = variable.get_value().shape
        if len(shape) == 1:
            variable.set_value(np.ones(shape, ml_dtypes.bfloat16))
            continue
        if shape not in draws:
            inputs = shape[1] if len(shape) == 3 and shape[0] == config["num_experts"] else shape[0]
            draws[shape] = (rng.standard_normal(shape, np.float32) * inputs**-0.5).astype(ml_dtypes.bfloat16)
        variable.set_value(np.roll(draws[shape], int(rng.integers(1, 10**6))))
    return module


def of_engine(engine: Engine, prompt: list[int], new: int) -> tuple[list[int], float]:
    """Tokens, and tokens per second of decoding."""
    with engine:
        for _ in range(2):
            out = engine.generate(prompt, max_new_tokens=new)
        return out.tokens, out.stats.tokens_per_second


def in_place(module: Any, prompt: list[int], new: int, residency: float) -> tuple[list[int], float, float]:
    """Tokens, tokens per second and hit rate of the module with its experts offloaded."""
    slots, length = sm.nnx.offload(module, "tunix", residency=residency), len(prompt) + new
    _, rest = nnx.split(module)  # what is left lies on the device, as a zoo's models do
    nnx.update(module, jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, rest))

    def step(model: Any, tokens: Any, cache: Any, at: Any) -> Any:
        positions = at + jnp.arange(tokens.shape[1])[None]
        logits, cache = model(tokens, positions, cache, positions[:, :, None] >= jnp.arange(length))
        return logits[:, -1].argmax(-1)[:, None], cache

    jitted = nnx.cached_partial(nnx.jit(step, donate_argnums=(0, 2)), module)
    for _ in range(2):
        cache, at = module.init_cache(1, length, jnp.bfloat16), len(prompt)
        token, cache = jitted(jnp.array([prompt]), cache, jnp.int32(0))
        made, begun = [token], 0.0
        for _ in range(new - 1):
            token, cache = jitted(token, cache, jnp.int32(at))
            at, made = at + 1, [*made, token]
            if len(made) == 2:  # compiled
                jax.block_until_ready(token)
                begun = time.perf_counter()
        jax.block_until_ready(token)
        speed = (new - 2) / (time.perf_counter() - begun)
    return [int(each[0, 0]) for each in made], speed, slots.hit_rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="qwen3-moe-24x32")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--residency", type=float, default=0.45)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=64)
    args = parser.parse_args()
    config = cut(args.preset, args.layers)
    prompt = np.random.default_rng(1).integers(0, config["vocab_size"], args.prompt).tolist()
    options: dict[str, Any] = dict(policy="lru", dtype="bfloat16", context=args.prompt + args.new)
    own = TokenEngine(random_model(config, dtype="bfloat16"), EngineOptions(residency=args.residency, **options))
    _, own_speed = of_engine(Engine(own, TokenIds(vocab=config["vocab_size"])), prompt, args.new)
    took = time.perf_counter()
    engine = sm.from_nnx(module_of(config), "tunix", residency=args.residency, config=config, **options)
    took = time.perf_counter() - took
    tokens, zoo_speed = of_engine(engine, prompt, args.new)
    full, full_speed = of_engine(
        sm.from_nnx(module_of(config), "tunix", residency=1.0, config=config, **options), prompt, args.new
    )
    placed, placed_speed, hit_rate = in_place(module_of(config), prompt, args.new, args.residency)
    print(
        json.dumps(
            {
                "device": jax.devices()[0].device_kind,
                "preset": args.preset,
                "layers": config["num_hidden_layers"],
                "residency": args.residency,
                "tokens_per_second": {
                    "engine": own_speed,
                    "from_nnx": zoo_speed,
                    "from_nnx, full load": full_speed,
                    "in place": placed_speed,
                },
                "from_nnx_seconds": took,
                "in_place_hit_rate": hit_rate,
                "from_nnx_equals_full_load": tokens == full,
                "in_place_agrees_with_from_nnx": sum(a == b for a, b in zip(placed, tokens, strict=True)),
                "new": args.new,
            }
        )
    )


if __name__ == "__main__":
    main()
