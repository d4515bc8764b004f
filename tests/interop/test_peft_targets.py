"""The modules that a LoraConfig names are those that PEFT's own function names."""

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists

from tpfuse.interop.peft_targets import named_modules

LEAVES = "self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.gate_up_proj"
BODIES = "", "model.", "model.encoder."
MODULES = [f"{body}layers.{i}.{leaf}" for body in BODIES for i in (0, 1, 11) for leaf in LEAVES]
CONFIGS = [
    dict(target_modules=["q_proj", "v_proj"]),
    dict(target_modules=["up_proj"]),
    dict(target_modules=["model.layers.1.mlp.up_proj", "layers.0.self_attn.q_proj"]),
    dict(target_modules=r".*\.(q|v)_proj"),
    dict(target_modules=r"model\.layers\.(0|11)\..*"),
    dict(target_modules=r"q_proj"),
    dict(target_modules=["q_proj", "up_proj"], layers_to_transform=[1, 11]),
    dict(target_modules=["q_proj"], layers_to_transform=0),
    dict(target_modules=["q_proj"], layers_to_transform=[]),
    dict(target_modules=["q_proj", "model.layers.1.mlp.up_proj"], layers_to_transform=[0]),
    dict(target_modules=["q_proj"], layers_to_transform=[1], layers_pattern="layers"),
    dict(target_modules=["q_proj"], layers_to_transform=[1], layers_pattern=["blocks", "layers"]),
    dict(target_modules=["q_proj"], layers_to_transform=[1], layers_pattern=["blocks"]),
    dict(target_modules=["q_proj"], layers_to_transform=[1], layers_pattern="(h|layers)"),
    dict(target_modules=["q_proj", "v_proj"], exclude_modules=["layers.0.self_attn.q_proj"]),
    dict(target_modules=["q_proj", "v_proj"], exclude_modules=r"model\.layers\.1\..*"),
]


@pytest.mark.parametrize("options", CONFIGS, ids=lambda options: " ".join(map(str, options.values())))
def test_as_peft(options):
    config = LoraConfig(**options)
    expected = {name for name in MODULES if check_target_module_exists(config, name)}
    assert named_modules("a file", options, MODULES, set()) == expected


def test_endings_of_experts_name_no_layer():
    config = dict(target_modules=["q_proj", "up_proj"])
    assert {name.rpartition(".")[2] for name in named_modules("", config, MODULES, {"up_proj"})} == {"q_proj"}


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "layers_pattern"])
def test_an_expression_that_is_none(key):
    config = dict(target_modules=["q_proj"], layers_to_transform=[1]) | {key: "(a"}
    with pytest.raises(ValueError, match=r"a file must hold regular expressions, got .*\(a"):
        named_modules("a file", config, MODULES, set())
