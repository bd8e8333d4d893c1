"""The optimised CUDA program of the decode step, compiled without a GPU.

Needs JAX's CUDA plugin (`pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt`, the versions of JAX); skipped
without it. In a process of its own, because a plugin is loaded once and for all.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from scripts.graph_report import H200

pytestmark = pytest.mark.skipif(find_spec("jax_cuda12_plugin") is None, reason="no CUDA plugin")

PROGRAM = """
import sys
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh
from seqmoe_jax.decode.policy import decode_policy
from seqmoe_jax.decode.state import empty_offload, empty_sequences
from seqmoe_jax.decode.step import StepConfig, jitted_step
from pallas_kernels.plan_tasks import PlanConfig
from seqmoe_jax.experts.cache import CacheConfig
from seqmoe_jax.prefetch.link import LiveLink
from seqmoe_jax.forecast import inference as plain
from seqmoe_jax.forecast.config import PredictorConfig
from seqmoe_jax.forecast.predictor import Predictor
from seqmoe_jax.loading import random_weights
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.models.fused import DecodeKernels
from seqmoe_jax.options import SamplingConfig
from seqmoe_jax.sampling import SamplingParams
from seqmoe_jax.testing import tiny_config

batch, dtype, planned = int(sys.argv[1]), sys.argv[2], bool(int(sys.argv[4]))  # by the dma engine's ways
changes = dict(hidden_size=256, moe_intermediate_size=128, mlp_only_layers=[], torch_dtype="bfloat16")
if dtype == "fp8":
    changes["quantization_config"] = dict(quant_method="fp8", weight_block_size=[128, 128])
if dtype == "mxfp4":
    changes |= dict(model_type="gpt_oss", intermediate_size=128, sliding_window=128,
                    rope_parameters=dict(rope_type="default"), quantization_config=dict(quant_method="mxfp4"))
spec = spec_from_config(tiny_config(**changes))
cache = CacheConfig(layout=spec.expert_layout, layers=3, experts=8, slots=11, rule="scored", managed=True,
                    implementation="gpu", tasks=4 if planned else 0)
topology = topologies.get_topology_desc(
    platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=sys.argv[3])
device = topology.devices[0]
on_device = SingleDeviceSharding(device)
pinned = SingleDeviceSharding(device, memory_kind="pinned_host")

def there(tree, sharding=on_device):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

sequences = jax.eval_shape(partial(empty_sequences, spec=spec, batch=batch, capacity=256, dtype=np.dtype(jnp.bfloat16)))
weights = jax.eval_shape(partial(random_weights, spec=spec, dtype=np.dtype(jnp.bfloat16)), jax.random.key(0))
pools = (jax.ShapeDtypeStruct((8, spec.expert_layout.block_elems), spec.expert_layout.storage),) * 3
sampling = jax.eval_shape(lambda: SamplingParams.of([SamplingConfig()], batch))
ends = jax.ShapeDtypeStruct((batch, 8), jnp.int32)
link = predictor = plan = foreseen = state = None
if planned:
    plan = PlanConfig(layers=3, experts=8, tasks=4, keep=4)
    foreseen = PredictorConfig(model="tiny", layers=3, experts=8, active=2, d_model=32, head_dim=16, d_state=8,
                               blocks=1, echo=16, vocabulary=256, token_rows=70, token_width=8, refine_width=16)
    from flax import nnx
    predictor = there(jax.eval_shape(lambda: Predictor(foreseen, rngs=nnx.Rngs(0)).weights() | {
        "token_table": jnp.zeros(256, jnp.int32)}))
    state = jax.eval_shape(lambda: plain.init_state(foreseen, batch, jnp.float32))
    word = jax.ShapeDtypeStruct((), jnp.float32)
    vector = jax.ShapeDtypeStruct((32,), jnp.int32)
    link = LiveLink(transfer_cost=there(word), landed=there(jax.ShapeDtypeStruct((11,), jnp.int32)),
                progress=there(vector, pinned), board=there(vector, pinned))
policy = decode_policy("seqmoe", cache, foreseen, plan=plan)
offload = jax.eval_shape(partial(empty_offload, cache))._replace(predictor=state)
abstract = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu"))
with use_abstract_mesh(abstract):
    lowered = jitted_step.lower(
        there(sequences), there(offload), there(weights), there(pools, pinned), there(sampling), there(ends),
        link, predictor,
        config=StepConfig(spec=spec, cache=cache, policy=policy, greedy=True, vocab=spec.vocab,
                          kernels=DecodeKernels.of("gpu")))
print(spec.expert_layout.block_elems)
print(lowered.compile().as_text())
"""


@pytest.mark.parametrize(
    ("batch", "dtype", "planned"),
    [
        (1, "bf16", 0),
        (4, "bf16", 0),
        (1, "fp8", 0),
        (1, "mxfp4", 0),
        (1, "bf16", 1),
    ],
)
def test_the_cuda_step_works_in_place_and_reads_the_pool_where_it_is(batch, dtype, planned):
    environment = os.environ | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(batch), dtype, H200, str(planned)],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    elements, text = done.stdout.split("\n", 1)
    storage = "u16" if dtype == "bf16" else "u8"
    buffers = [rf"{storage}\[11,{elements}\]", r"s32\[11\]", r"s32\[24\]", rf"bf16\[{batch},2,256,32\]"]
    if dtype == "mxfp4":  # layers with a window
        buffers.append(rf"bf16\[{batch},2,128,32\]")
    for buffer in buffers:
        assert re.search(buffer, text), buffer
        assert not re.findall(rf"= {buffer}\S* (?:copy|copy-start)\(.*", text), buffer
    # The pool is an operand of the kernel that loads misses, and of nothing else: it stays where it is.
    uses = re.findall(r".*%pools_\d_[\w.]*[,)].*", text[text.index("ENTRY") :])
    assert uses
    assert all("custom-call" in line or "ENTRY" in line or "parameter(" in line for line in uses)
    # Each layer's first launch of the experts is what loads; hidden values are completed in place by the next one.
    assert len(re.findall(r"custom-call\(.*%pools_\d.*fused_moe_load_and_up", text)) == 3
    assert not re.findall(rf"= (?:bf16|f32)\[{2 * batch},128\]\S* (?:copy|copy-start)\(", text)
    # Ten kernels in each of the three layers, and what a step does once, with a rollout of the predictor in it.
    launches = re.findall(r" (?:fusion|custom-call)\(", text[text.index("ENTRY") :])
    assert len(launches) <= 3 * 10 + (72 if planned else 24)
    assert len(re.findall(r"custom-call.*plan_tasks", text)) == (2 if planned else 0)
    donated = 3 * 2 + 4 + 9
    assert len(re.findall(r"(?:may|must)-alias", text.splitlines()[0])) >= donated - 2
