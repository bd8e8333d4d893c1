"""How many CUDA graphs and how many single launches a decode step is: the program XLA makes of it, read thunk by thunk.

    python scripts/graph_report.py --policies full lru evict dma [--no-decode-kernels] [--out graphs.json]
    python scripts/graph_report.py --dump DIR        # of a run with XLA_FLAGS=--xla_dump_to=DIR

Compiles for the GPU that is there, or without one for an H200: that needs JAX's CUDA plugin (`pip install --no-deps
jax-cuda12-plugin jax-cuda12-pjrt`, the versions of JAX) and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_PLATFORMS=cpu. No
weights are made. Without a GPU nothing is tuned by trial, so XLA may choose other kernels for some matrices.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from pallas_kernels.plan_tasks import PlanConfig
from seqmoe_jax.bench.settings import VARIANTS, Setting
from seqmoe_jax.decode.policy import decode_policy
from seqmoe_jax.decode.state import empty_offload, empty_sequences
from seqmoe_jax.decode.step import StepConfig, jitted_step
from seqmoe_jax.experts.cache import CacheConfig
from seqmoe_jax.experts.policy import rule_of
from seqmoe_jax.forecast import inference as plain
from seqmoe_jax.forecast import store
from seqmoe_jax.forecast.by_rows import by_rows
from seqmoe_jax.loading import random_weights
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.models.fused import DecodeKernels
from seqmoe_jax.models.spec import ModelSpec
from seqmoe_jax.options import THRESHOLD, EngineOptions, SamplingConfig, check_policy
from seqmoe_jax.prefetch.link import LiveLink
from seqmoe_jax.presets import preset_path
from seqmoe_jax.sampling import SamplingParams

# What XLA asks of a device that is not there; sizes of an H200.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation"
  device_address_bits: 64 name: "NVIDIA H200"
  driver_version: "12.9.0" runtime_version: "12.9.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
BF16 = np.dtype(jnp.bfloat16)


def read_thunks(text: str) -> dict[str, Any]:
    """A thunk sequence as XLA prints it: graphs, launches in them and outside, by kind and by name.

    A command buffer (`kCommandBuffer`) is launched as one CUDA graph. What is indented below another thunk (a loop, a
    conditional) counts as a launch of its own.
    """
    sizes: list[int] = []
    kinds, names = (Counter[str](), Counter[str]()), (Counter[str](), Counter[str]())  # outside graphs, inside
    graph_depth: int | None = None
    for indent, kind, rest in re.findall(r"^( *)\d+: (k\w+)\s*\[[^\]]*\] ?(.*)$", text, re.MULTILINE):
        if graph_depth is not None and len(indent) <= graph_depth:
            graph_depth = None
        if graph_depth is None and kind == "kCommandBuffer":
            graph_depth = len(indent)
            sizes.append(0)
            continue
        inside = graph_depth is not None
        if inside:
            sizes[-1] += 1
        kinds[inside][kind] += 1
        names[inside][re.sub(r"([._]+\d+)+$", "", rest.split(" grid:")[0].split("(")[0].strip() or kind)] += 1
    return {
        "graphs": len(sizes),
        "graph_sizes": sizes,
        "launches_in_graphs": sum(sizes),
        "single_launches": sum(kinds[False].values()),
        "kinds_outside": dict(kinds[False].most_common()),
        "kinds_in_graphs": dict(kinds[True].most_common()),
        "outside": dict(names[False].most_common()),
        "in_graphs": dict(names[True].most_common()),
    }


def read_dump(directory: Path) -> dict[str, Any]:
    """The report of the decode step among what XLA has dumped; the last one, if there are several."""
    for pattern in ("*jit_step*thunk_sequence_after_thunk_passes*.txt", "*jit_step*thunk_sequence*.txt"):
        files = sorted(directory.glob(pattern))
        if files:
            return read_thunks(files[-1].read_text())
    raise SystemExit(f"graph_report: no thunk sequence of jit_step in {directory}: was the step read from a cache?")


def compiled_step(spec: ModelSpec, name: str, device: Any, args: argparse.Namespace, dump: str) -> None:
    """Compiles the decode step of one setting for `device`, which need not be there; XLA dumps what it does."""
    setting = Setting(name="full", options=EngineOptions(policy="full")) if name == "full" else VARIANTS[name]
    options = setting.options
    layers, moe = len(spec.moe_layers), spec.moe
    slots = spec.num_keys if name == "full" else round(args.residency * spec.num_keys)
    predictor, weights_of_predictor, state, plan, link = None, None, None, None, None
    if setting.predicted:
        loaded, arrays = store.load(args.predictor, dtype=BF16)
        loaded.check(layers=layers, experts=moe.num_experts, active=moe.top_k)
        predictor = loaded
        weights_of_predictor = jax.eval_shape(lambda: by_rows(jax.tree.map(jnp.asarray, arrays)))
        state = jax.eval_shape(lambda: plain.init_state(loaded, args.batch, BF16))
        if options.transfers == "dma":
            keep = min(2 * moe.top_k * args.batch, moe.num_experts)
            plan = PlanConfig(
                layers=layers, experts=moe.num_experts, tasks=args.tasks, threshold=THRESHOLD, keep=keep,
            )  # fmt: skip
        elif options.transfers != "none":
            raise SystemExit(f"graph_report: {name} is not of one program; take full, lru, lfu, history, evict or dma*")
    policy_name = check_policy(options.policy)
    cache = CacheConfig(
        layout=spec.expert_layout, layers=layers, experts=moe.num_experts, slots=slots, rule=rule_of(policy_name),
        managed=name != "full", implementation="gpu", tasks=0 if plan is None else plan.tasks,
    )  # fmt: skip
    policy = decode_policy(policy_name, cache, predictor, refine=options.refine, plan=plan)
    on_device = SingleDeviceSharding(device)
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")

    def there(tree: Any, sharding: Any = on_device) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

    def numbers(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    if plan is not None:
        scalar = there(numbers(dtype=jnp.float32))
        link = LiveLink(scalar, *there((numbers(slots), numbers(16), numbers(plan.board_words)), pinned))
    config = StepConfig(
        spec=spec, cache=cache, policy=policy, greedy=True, vocab=spec.vocab,
        kernels=DecodeKernels.of("gpu" if args.decode_kernels else "xla"),
    )  # fmt: skip
    sequences = jax.eval_shape(partial(empty_sequences, spec=spec, batch=args.batch, capacity=args.context, dtype=BF16))
    offload = jax.eval_shape(partial(empty_offload, cache))._replace(predictor=state)
    weights = jax.eval_shape(partial(random_weights, spec=spec, dtype=BF16), jax.random.key(0))
    pools = (
        jax.ShapeDtypeStruct((moe.num_experts, spec.expert_layout.block_elems), spec.expert_layout.storage),
    ) * layers
    sampling = jax.eval_shape(lambda: SamplingParams.of([SamplingConfig()], args.batch))
    abstract = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu"))
    with use_abstract_mesh(abstract):
        lowered = jitted_step.lower(
            there(sequences), there(offload), there(weights), there(pools, pinned), there(sampling),
            there(numbers(args.batch, 8)), link, there(weights_of_predictor), config=config,
        )  # fmt: skip
    lowered.compile(compiler_options={"xla_dump_to": dump})


def the_device() -> Any:
    """The GPU of this machine, or one that is described."""
    if jax.default_backend() == "gpu":
        return jax.devices()[0]
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=H200
    ).devices[0]


def describe(name: str, report: dict[str, Any]) -> str:
    outside = ", ".join(f"{count} {what}" for what, count in report["outside"].items()) or "nothing"
    sizes = " + ".join(map(str, report["graph_sizes"][:12])) + (" + ..." if report["graphs"] > 12 else "")
    return (
        f"{name:12} {report['graphs']:3} graphs of {report['launches_in_graphs']:4} launches ({sizes}), "
        f"{report['single_launches']:3} outside: {outside}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("preset", nargs="?", default="qwen3-moe-24x32")
    add("--policies", nargs="+", default=["full", "lru", "history"], metavar="NAME",
        help=f"full or of {', '.join(VARIANTS)}")  # fmt: skip
    add("--predictor", type=Path, help="for those that forecast")
    add("--residency", type=float, default=0.45)
    add("--batch", type=int, default=1)
    add("--context", type=int, default=1024, help="positions of the keys and values")
    add("--layers", type=int, help="the preset with so many layers: compiling takes a second for each")
    add("--tasks", type=int, default=5, help="open prefetch tasks")
    add("--decode-kernels", action=argparse.BooleanOptionalAction, default=True)
    add("--dump", type=Path, help="read this dump instead of compiling")
    add("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    if args.dump is not None:
        reports = {args.dump.name: read_dump(args.dump)}
        print(describe(*next(iter(reports.items()))))
    else:
        config = json.loads(preset_path(args.preset).read_text())
        if args.layers:
            config["num_hidden_layers"] = args.layers
            config.pop("layer_types", None)
        spec, device, reports = spec_from_config(config), the_device(), {}
        for name in args.policies:
            with tempfile.TemporaryDirectory(prefix="seqmoe-graphs-") as dump:
                compiled_step(spec, name, device, args, dump)
                reports[name] = read_dump(Path(dump))
            print(describe(name, reports[name]), flush=True)
    if args.out:
        args.out.write_text(
            json.dumps({"jax": jax.__version__, "settings": vars(args), "reports": reports}, default=str)
        )


if __name__ == "__main__":
    main()
