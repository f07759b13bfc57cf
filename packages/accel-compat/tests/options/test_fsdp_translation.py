"""accel's options of FSDP with the values of Accelerate's plugin."""

import functools

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from accel_backends.fsdp.config import BackwardPrefetch
from accel_backends.fsdp.wrap_units import find_units
from accel_compat.options.fsdp import CompatFSDPPlugin
from accel_compat.options.fsdp_translation import translate_fsdp


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"fsdp_version": 2, "cpu_offload": True}, {"cpu_offload": True, "pin_memory": None}),
        ({"fsdp_version": 2}, {"cpu_offload": False}),
        ({"fsdp_version": 1, "cpu_offload": True, "use_orig_params": True}, {"cpu_offload": True}),
        ({"fsdp_version": 2, "ignored_modules": "head"}, {"ignored_modules": "head"}),
        (
            {"fsdp_version": 2, "activation_checkpointing": True, "activation_checkpointing_offload": True},
            {"activation_checkpointing_offload": True},
        ),
        (
            {"fsdp_version": 1, "use_orig_params": True, "limit_all_gathers": False, "forward_prefetch": True},
            {"limit_all_gathers": False, "forward_prefetch": 1},
        ),
        (
            {"fsdp_version": 1, "use_orig_params": True, "backward_prefetch": "BACKWARD_POST"},
            {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        ),
        ({"fsdp_version": 2, "cpu_offload": CPUOffloadPolicy(pin_memory=False)}, {"pin_memory": False}),
    ],
)
def test_options_of_the_plugin_are_those_of_the_backend(given, expected):
    made = translate_fsdp(CompatFSDPPlugin(**given))
    assert {name: getattr(made, name) for name in expected} == expected


@pytest.mark.parametrize("version", [1, 2])
def test_a_function_of_the_user_chooses_the_units(version):
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, torch.nn.Linear))
    plugin = CompatFSDPPlugin(
        fsdp_version=version, auto_wrap_policy=policy, use_orig_params=None if version == 2 else True
    )
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.nn.Linear(2, 2))
    assert find_units(model, translate_fsdp(plugin)).blocks == ("0.0", "1")


@pytest.mark.parametrize("version", [1, 2])
def test_dtypes_that_the_user_gave_override_those_of_the_precision(version):
    given = {"fsdp_version": version, "mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
    if version == 1:
        given["use_orig_params"] = True
    plugin = CompatFSDPPlugin(**given)
    plugin.set_mixed_precision("fp16")
    made = translate_fsdp(plugin).mixed_precision_policy
    assert (made["param_dtype"], made["reduce_dtype"]) == (torch.bfloat16, torch.float32)


def test_without_them_the_backend_has_those_of_the_precision():
    plugin = CompatFSDPPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert translate_fsdp(plugin).mixed_precision_policy is None
