"""A configuration is understood, or its fault is named."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmoe_jax.errors import ConfigError
from seqmoe_jax.models.families import spec_from_config
from seqmoe_jax.models.mlp import DenseSpec
from seqmoe_jax.models.spec import MoESpec
from seqmoe_jax.testing import tiny_config


def test_both_generations_of_files_give_the_same_model():
    old = tiny_config(rope_theta=5e5, rope_scaling=None)
    new = tiny_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, num_local_experts=8, dtype="float32")
    for key in ("rope_theta", "num_experts", "torch_dtype"):
        del new[key]
    assert spec_from_config(old) == spec_from_config(new)


def test_dense_layers_are_where_the_file_says():
    spec = spec_from_config(tiny_config())
    assert [type(layer.mlp) for layer in spec.layers] == [MoESpec, DenseSpec, MoESpec]
    assert spec.moe_layers == (0, 2)
    sparse = spec_from_config(tiny_config(mlp_only_layers=[], decoder_sparse_step=3))
    assert sparse.moe_layers == (2,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "t5"}, "model_type 't5' is not supported; supported: 'deepseek_v2', "),
        ({"model_type": None}, "'model_type' is missing"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "64"}, "'hidden_size' must be an integer, got '64'"),
        ({"hidden_size": True}, "'hidden_size' must be an integer"),
        ({"num_experts": -8}, "'num_experts' must be an integer from 1"),
        ({"num_experts_per_tok": 9}, "exceeds num_experts"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope' is not supported; supported: 'default', 'yarn'"),
        ({"rope_scaling": {"type": "yarn"}}, "'factor' is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 0.5}}, "beta_fast > beta_slow"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size"),
        ({"mlp_only_layers": [0, 1, 2]}, "nothing to offload"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers"),
    ],
)
def test_faults_are_named_in_one_line(changes, words):
    with pytest.raises(ConfigError) as error:
        spec_from_config(tiny_config(**changes))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(-2, 2) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([*sorted(tiny_config()), "quantization_config", "rope_parameters", "head_dim"]), json_values)
@settings(deadline=None)
def test_any_value_of_any_field_is_understood_or_refused(field, value):
    try:
        spec = spec_from_config(json.loads(json.dumps(tiny_config(**{field: value}))))
    except ConfigError:
        return
    assert spec.num_keys > 0
