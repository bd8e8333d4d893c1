"""`/metrics` counts what happened, in Prometheus's form."""

import time

import jax
import numpy as np
import pytest
from client import COMPLETIONS, call, events, post


def scrape(port):
    """The values by name and labels."""
    parser = pytest.importorskip("prometheus_client.parser")
    status, data = call(port, "GET", "/metrics")
    assert status == 200
    families = parser.text_string_to_metric_families(data.decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_tokens_answers_and_times_are_counted(port):
    before = scrape(port)
    post(port, COMPLETIONS, prompt=["abc", "de"], max_tokens=3)
    events(port, COMPLETIONS, prompt="abc", max_tokens=4)
    post(port, COMPLETIONS, prompt="abc", temperature=-1)
    after = scrape(port)
    grown = {key: after[key] - before.get(key, 0) for key in after}
    assert grown["seqmoe_prompt_tokens_total",] == 8
    assert grown["seqmoe_generation_tokens_total",] == 10
    assert grown["seqmoe_answers_total", "length"] == 3
    assert grown["seqmoe_time_to_first_token_seconds_count",] == 3
    assert grown["seqmoe_time_between_tokens_seconds_count",] == 7
    assert after["seqmoe_prompts_running",] == after["seqmoe_prompts_waiting",] == 0


def test_experts_are_summed_over_generations(port, engine):
    before = scrape(port)
    routed = moved = 0
    for prompt in ("first", "second"):
        earlier = engine.stats
        post(port, COMPLETIONS, prompt=prompt, max_tokens=6)
        deadline = time.monotonic() + 30  # the answer may be there before the generation has counted
        while (engine.stats is earlier or not engine.stats.experts_routed) and time.monotonic() < deadline:
            time.sleep(0.01)
        scrape(port)
        routed, moved = routed + engine.stats.experts_routed, moved + engine.stats.bytes_moved
    after = scrape(port)
    assert after["seqmoe_experts_routed_total",] - before["seqmoe_experts_routed_total",] == routed > 0
    assert after["seqmoe_bytes_moved_total",] - before["seqmoe_bytes_moved_total",] == moved > 0
    assert after["seqmoe_expert_hit_rate",] == engine.stats.hit_rate


def test_compilations_are_counted(port):
    before = scrape(port)["seqmoe_compilations_total",]
    jax.jit(lambda x: x * 2 + 1)(np.arange(7.0)).block_until_ready()
    after = scrape(port)
    assert after["seqmoe_compilations_total",] > before
    assert after["seqmoe_compilation_seconds_total",] > 0
