"""What a cache policy does around the layers of a decode step: at its start, midway and at its end (paper 6, 7).

Three kinds, of one interface. `ReactivePolicy`: scores follow from use alone, inside `slot_update`, or stand as they
were set. `HistoryPolicy`: experts are scored by a discounted frequency of use. `ForecastPolicy`: experts are scored by
the Mamba2 predictor's forecast, and transfers are planned by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from pallas_kernels.plan_tasks import SLOT, PlanConfig, plan_tasks
from seqmoe_jax.decode.state import Offload
from seqmoe_jax.experts.cache import CacheConfig, rescore
from seqmoe_jax.forecast import forecaster, history
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.forecaster import Forecast
from seqmoe_jax.options import Policy
from seqmoe_jax.prefetch.link import Link

Tasks = Int32[Array, "5 N"] | None  # a plan (`plan_tasks`); None where nothing is prefetched


class Routing(NamedTuple):
    """Where the first l MoE layers of a step sent the tokens of B sequences (ids -1: the sequence has ended)."""

    ids: Int[Array, "l B K"]
    weights: Float32[Array, "l B K"]


class Coming(NamedTuple):
    """What the coming step processes."""

    tokens: Int[Array, " B"]
    active: Bool[Array, " B"]  # its sequence goes on


class PolicyInputs(NamedTuple):
    """Arrays that policies read and do not own: the predictor's weights (`forecast.inference`), the link to the
    transfer engine, and by MoE layer the tables of hash-routed layers."""

    predictor: Any = None
    link: Link | None = None
    hash_tables: Mapping[int, Int32[Array, "V K"]] = {}


@dataclass(frozen=True, kw_only=True)
class ReactivePolicy:
    """lru and lfu, whose scores `slot_update` keeps; prefill-hot and full, whose scores were set before.

    trigger: MoE layer before which `midway` is called; None: never.
    """

    trigger: int | None = None

    def begin(self, offload: Offload) -> Offload:
        """Before the first layer: the scores that hold during this step."""
        return offload

    def midway(
        self, offload: Offload, routing: Routing, active: Bool[Array, " B"], clock: Int[Array, ""], inputs: PolicyInputs
    ) -> Offload:
        """Before MoE layer `trigger`: the layers still to come are forecast and planned for anew.

        clock: the position of this step's first layer.
        """
        return offload

    def end(self, offload: Offload, routing: Routing, coming: Coming, inputs: PolicyInputs) -> tuple[Offload, Tasks]:
        """After the last layer: the coming step is forecast and planned for."""
        return offload, None

    def after_prompt(
        self, offload: Offload, features: Any, coming: Coming, others: Int[Array, ""], inputs: PolicyInputs
    ) -> Offload:
        """After a prompt: its first step is forecast from what its last token routed to, `features` [1, keys] (None
        without a predictor). It decodes beside `others`, whose step is forecast already."""
        return offload


@dataclass(frozen=True, kw_only=True)
class HistoryPolicy(ReactivePolicy):
    """Policy seqmoe without a predictor: the forecast is made of the past."""

    cache: CacheConfig

    def begin(self, offload: Offload) -> Offload:
        # Computed, not kept in the state: there it would have to be copied, being read in every layer and replaced.
        with jax.named_scope("rescore"):
            return offload._replace(cache=offload.cache._replace(key_score=forecaster.worth(offload.forecast)))

    def end(self, offload: Offload, routing: Routing, coming: Coming, inputs: PolicyInputs) -> tuple[Offload, Tasks]:
        with jax.named_scope("forecast"):
            retention = history.observe(offload.forecast.retention, routing.ids, self.cache.experts)
            forecast = self._with_known(forecaster.from_history(retention), coming, inputs)
        cache = rescore(offload.cache, forecaster.worth(forecast))
        return offload._replace(cache=cache, forecast=forecast), None

    def _with_known(self, forecast: Forecast, coming: Coming, inputs: PolicyInputs) -> Forecast:
        """The forecast in which the routing of hash-routed layers, which follows from the tokens, is exact."""
        if not inputs.hash_tables:
            return forecast
        by_layer = forecast.probability.reshape(self.cache.layers, self.cache.experts)
        known = forecaster.known_routing(by_layer, inputs.hash_tables, coming.tokens, coming.active)
        return forecast._replace(probability=known.reshape(-1))


@dataclass(frozen=True, kw_only=True)
class ForecastPolicy(HistoryPolicy):
    """Policy seqmoe with a predictor.

    plan: how transfers are planned; None: nothing is prefetched.
    ahead: plans made at the end of a step are for the step so many steps on: 1, or 2 for an engine whose transfers land
        between steps. Such an engine is told nothing in mid-step.
    """

    config: PredictorConfig
    plan: PlanConfig | None = None
    ahead: int = 1

    @property
    def _plans_midway(self) -> bool:
        return self.plan is not None and self.trigger is not None and self.ahead == 1

    def midway(
        self, offload: Offload, routing: Routing, active: Bool[Array, " B"], clock: Int[Array, ""], inputs: PolicyInputs
    ) -> Offload:
        layer, layers, experts = len(routing.ids), self.cache.layers, self.cache.experts
        with jax.named_scope("refine"):
            known = forecaster.features(*routing, layers=layers, experts=experts)
            again = forecaster.refine(self.config, inputs.predictor, offload.predictor, known, active)
            to_come = again.reshape(-1)[layer * experts :]
            probability = offload.forecast.probability.at[layer * experts :].set(to_come)
            forecast = offload.forecast._replace(probability=probability)
            if not self._plans_midway:
                return offload._replace(cache=rescore(offload.cache, forecaster.worth(forecast), layer * experts))
            return self._follow(offload, forecast, again, clock, layer, inputs)[0]

    def end(self, offload: Offload, routing: Routing, coming: Coming, inputs: PolicyInputs) -> tuple[Offload, Tasks]:
        with jax.named_scope("forecast"):
            features = forecaster.features(*routing, layers=self.cache.layers, experts=self.cache.experts)
            offload, forecast, chance = self._foresee(offload, features, coming, inputs, self.ahead)
            if inputs.hash_tables and self.ahead == 1:
                chance = forecast.probability.reshape(chance.shape)
        clock = offload.cache.clock + (self.ahead - 1) * self.cache.layers
        return self._follow(offload, forecast, chance, clock, 0, inputs)

    def after_prompt(
        self, offload: Offload, features: Any, coming: Coming, others: Int[Array, ""], inputs: PolicyInputs
    ) -> Offload:
        before, inputs = offload.forecast, inputs._replace(hash_tables={})
        offload, new, _ = self._foresee(offload, features, coming, inputs, 1)
        forecast = forecaster.together(before, others, new, coming.active.sum(dtype=jnp.int32))
        return offload._replace(forecast=forecast, cache=rescore(offload.cache, forecaster.worth(forecast)))

    def _foresee(
        self, offload: Offload, features: Float[Array, "B keys"], coming: Coming, inputs: PolicyInputs, ahead: int
    ) -> tuple[Offload, Forecast, Float32[Array, "L E"]]:
        """The predictor takes in a step. Also returns the forecast and the chances of the step planned for."""
        state, forecast, chance = forecaster.foresee(
            self.config, inputs.predictor, offload.predictor, features, *coming, ahead=ahead
        )
        forecast = self._with_known(forecast, coming, inputs)
        return offload._replace(predictor=state, forecast=forecast), forecast, chance

    def _follow(
        self,
        offload: Offload,
        forecast: Forecast,
        chance: Float32[Array, "L E"],
        clock: Int[Array, ""],
        first_layer: int,
        inputs: PolicyInputs,
    ) -> tuple[Offload, Tasks]:
        """Scores by `forecast` for the layers from `first_layer` on, and a plan by `chance` of the step at `clock`."""
        cache, key_score, link = offload.cache, forecaster.worth(forecast), inputs.link
        if self.plan is None or link is None:
            return offload._replace(cache=rescore(cache, key_score, first_layer * self.cache.experts)), None
        with jax.named_scope("plan"):
            tables, tags, tasks = plan_tasks(
                cache.tables, cache.open_slots, chance.reshape(-1), key_score, base=clock,
                next_tag=offload.tags, transfer_cost=link.transfer_cost, first_layer=first_layer, config=self.plan,
                board=link.board, implementation=self.cache.implementation,
            )  # fmt: skip
        cache = cache._replace(tables=tables, key_score=key_score, open_slots=tasks[SLOT])
        return offload._replace(cache=cache, tags=tags), tasks


def decode_policy(
    name: Policy,
    cache: CacheConfig,
    predictor: PredictorConfig | None = None,
    *,
    refine: bool = True,
    plan: PlanConfig | None = None,
    ahead: int = 1,
) -> ReactivePolicy:
    """What the policy of that name does in a step. `refine`: the running step is forecast anew at half of its layers;
    the rest as in `ForecastPolicy`."""
    if name != "seqmoe":
        return ReactivePolicy()
    if predictor is None:
        return HistoryPolicy(cache=cache)
    trigger = cache.layers // 2 if refine and cache.layers > 1 else None
    return ForecastPolicy(cache=cache, config=predictor, trigger=trigger, plan=plan, ahead=ahead)
