"""One setting of an engine, timed: warm-up, repeats, medians."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from pallas_kernels.backend import Implementation
from seqmoe_jax.bench.profile import profile_steps
from seqmoe_jax.bench.settings import Setting
from seqmoe_jax.decode.step import Replay
from seqmoe_jax.engine import Model, Predictor, TokenEngine
from seqmoe_jax.sampling import SamplingConfig

PROMPT = 128  # tokens


def measure(
    model: Model,
    setting: Setting,
    *,
    predictor: Predictor | None,
    replay: Replay | None,
    steps: int,
    repeats: int,
    temperature: float = 0.0,
    profiled: int = 0,
    kernels: Implementation | None = None,
    decode_kernels: bool = True,
) -> dict[str, Any]:
    """One row of the table. Times are of the decode phase; the
    first generation warms programs and cache up. A run after those timed, of which the last
    `profiled` steps are profiled, says where the time goes.

    Memory in bytes of the device: `planned_bytes`, `used_bytes` while the engine lives, and `peak_bytes`, which is of
    the process so far: give residencies in rising order to have it of each.
    """
    rng, device = np.random.default_rng(0), next(iter(model.weights.embed.devices()))
    engine = TokenEngine(
        model,
        replace(setting.options, context=PROMPT + steps + 1, kernels=kernels, decode_kernels=decode_kernels),
        predictor=predictor if setting.predicted else None,
        replay=None if replay is None else jax.device_put(replay, device),
    )
    runs, tokens, compile_s = [], [], 0.0
    begun = time.perf_counter()
    try:
        for repeat in range(repeats + 1):
            prompts = [rng.integers(0, model.spec.vocab, PROMPT).tolist() for _ in range(setting.options.max_batch)]
            sampling = SamplingConfig(temperature=temperature, seed=repeat)
            events = list(engine.run(prompts, max_new_tokens=steps + 1, sampling=sampling))
            if repeat == 0:
                tokens, compile_s = [event.token for event in events], engine.last_stats.compile_s
                first = engine.last_stats
            else:
                runs.append(replace(engine.last_stats))
        engine_fault = None if engine._transfers is None else engine._transfers.fault()
        cost = getattr(engine._transfers, "transfer_cost", None)
        memory = device.memory_stats() or {}
        shares: dict[str, Any] | None = None
        if profiled:
            try:
                shares = profile_steps(engine, prompts, new=steps + 1, steps=profiled, sampling=sampling)
            except Exception as error:  # what was measured stands without it
                shares = {"error": repr(error)}
    finally:
        engine.close()
    runs = runs or [first]

    def median(read: Any) -> float:
        return statistics.median(read(run) for run in runs)

    return {
        "name": setting.name,
        "residency": round(engine.plan.residency, 4),
        "slots": engine.plan.slots,
        "batch": setting.options.max_batch,
        "tokens_per_second": median(lambda run: run.tokens_per_second),
        "spread": [min(run.tokens_per_second for run in runs), max(run.tokens_per_second for run in runs)],
        "step_us": median(lambda run: 1e6 * setting.options.max_batch / run.tokens_per_second),
        "hit_rate": median(lambda run: run.hit_rate),
        "loaded_per_step": median(lambda run: run.experts_loaded_decoding / steps),
        "awaited_per_step": median(lambda run: run.experts_awaited / steps),
        "prefetched_per_step": median(lambda run: run.experts_prefetched / steps),
        "bytes_per_step": median(lambda run: run.bytes_moved_decoding / steps),
        "transfers": runs[0].transfers,
        "scheduler": setting.options.scheduler if setting.predicted else None,
        "transfer_cost": cost,
        "ttft_s": median(lambda run: run.ttft_s),
        "kernels": runs[0].kernels,
        "forecast": runs[0].forecast,
        "compile_s": round(compile_s, 1),
        "seconds": round(time.perf_counter() - begun, 1),
        "planned_bytes": engine.plan.total,
        "used_bytes": memory.get("bytes_in_use"),
        "peak_bytes": memory.get("peak_bytes_in_use"),
        "shares": shares,
        "fault": engine_fault,
        "first_tokens": tokens[:32],
    }
