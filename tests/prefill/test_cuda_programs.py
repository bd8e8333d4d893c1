"""The optimised CUDA programs of a prompt's experts, compiled without a GPU: see `test_cuda_program`."""

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
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh
from pallas_kernels.grouped_moe import assign_blocks
from seqmoe_jax.experts.cache import CacheConfig, empty_cache
from seqmoe_jax.forecast.forecaster import from_history
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.prefill.experts import ROWS_PER_BLOCK, ExpertCounts
from seqmoe_jax.prefill.programs import Routed, apply_experts
from seqmoe_jax.testing import tiny_config

slots, rule, length = int(sys.argv[1]), sys.argv[2], 1024
changes = dict(hidden_size=256, moe_intermediate_size=128, mlp_only_layers=[], torch_dtype="bfloat16")
spec = spec_from_config(tiny_config(**changes))
config = CacheConfig(layout=spec.expert_layout, layers=3, experts=8, slots=slots, rule=rule, managed=True,
                     implementation="gpu")
topology = topologies.get_topology_desc(
    platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=sys.argv[3])
device = topology.devices[0]
on_device = SingleDeviceSharding(device)
pinned = SingleDeviceSharding(device, memory_kind="pinned_host")

def there(tree, sharding=on_device):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

def array(shape, dtype=jnp.int32, sharding=on_device):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

cache = there(jax.eval_shape(lambda: empty_cache(config)))
forecast = there(jax.eval_shape(lambda: from_history(jnp.zeros(24))))
donated = cache, forecast, ExpertCounts(array((3,)), array((3, 8)))
storage, elements = spec.expert_layout.storage, spec.expert_layout.block_elems
routed = Routed(array((length, 256), jnp.bfloat16), array((length, 2)), array((length, 2), jnp.float32))
_, block_rows, _ = jax.eval_shape(
    lambda: assign_blocks(jnp.zeros((length, 2), jnp.int32), num_experts=8, rows=ROWS_PER_BLOCK))
abstract = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu"))
with use_abstract_mesh(abstract):
    text = apply_experts.lower(
        *donated, routed, array((8, elements), storage, pinned), array(()),
        config=config, rule="share" if rule == "scored" else "none").compile().as_text()
print(elements, ",".join(map(str, (*block_rows.shape, 256))), len(jax.tree.leaves(donated)))
print(text)
"""


@pytest.mark.parametrize(("slots", "rule"), [(11, "scored"), (5, "lru")])  # a layer's experts fit the slots or do not
def test_slots_and_outputs_are_updated_in_place_and_the_pool_is_read_where_it_is(slots, rule):
    environment = os.environ | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(slots), rule, H200],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    sizes, text = done.stdout.split("\n", 1)
    elements, outputs, donated = sizes.split()
    for buffer in (rf"u16\[{slots},{elements}\]", rf"f32\[{outputs}\]"):
        assert re.search(buffer, text), buffer
        assert not re.findall(rf"= {buffer}\S* (?:copy|copy-start)\(.*", text), buffer
    assert len(re.findall(r"(?:may|must)-alias", text.strip().splitlines()[0])) == int(donated)
    # The pool is an operand of the kernel that loads misses; nothing makes another one of it.
    pool = rf"u16\[8,{elements}\]"
    made = set(re.findall(rf"= {pool}\S* ([\w-]+)\(", text))
    assert made <= {"parameter", "get-tuple-element"}
    assert re.search(rf"custom-call\(.*{pool}", text)
