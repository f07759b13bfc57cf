from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_precision import (
    AORecipeKwargs,
    DeviceFacts,
    PrecisionError,
    PrecisionPolicy,
    TERecipeKwargs,
    resolve,
    unsupported,
)

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
CPU = DeviceFacts("cpu", fp8_libraries=("torchao",))
OLD = DeviceFacts("cuda", computes=frozenset({FP16, FP32, FP64}), autocasts=frozenset({FP16}))
BARE = DeviceFacts("mps", computes=frozenset({FP32}), autocasts=frozenset())


@pytest.mark.parametrize(
    ("spec", "params", "compute", "output", "autocast", "scaling"),
    [
        (None, None, None, None, False, "none"),
        ("no", None, None, None, False, "none"),
        ("fp32", None, None, None, False, "none"),
        ("bf16", None, BF16, FP32, True, "none"),
        ("bf16-mixed", None, BF16, FP32, True, "none"),
        ("fp16", None, FP16, FP32, True, "dynamic"),
        ("FP8", None, BF16, FP32, True, "none"),
        ("fp16-true", FP16, FP16, None, False, "none"),
        ("bf16-true", BF16, BF16, None, False, "none"),
        ("64", FP64, FP64, None, False, "none"),
        ("compute=bf16", None, BF16, FP32, True, "none"),
        ("params=fp32,compute=bf16,reduce=fp32,output=fp32", FP32, BF16, FP32, True, "none"),
        ("params=fp32, compute=fp16", FP32, FP16, FP32, True, "dynamic"),
        ("compute=float16,scaling=static", None, FP16, FP32, True, "static"),
        ("bf16,output=none", None, BF16, None, True, "none"),
        ("bf16-true,output=fp32", BF16, BF16, FP32, False, "none"),
        ("params=double", FP64, FP64, None, False, "none"),
        ("compute=fp64", FP64, FP64, None, False, "none"),
        ("reduce=bf16", None, None, None, False, "none"),
    ],
)
def test_a_text_says_which_dtype_plays_which_role(spec, params, compute, output, autocast, scaling):
    policy = PrecisionPolicy.parse(spec)
    assert (policy.params, policy.compute, policy.output) == (params, compute, output)
    assert (policy.autocast, policy.scaling) == (autocast, scaling)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("bf17", ["'bf17'", "did you mean 'bf16'"]),
        ("computes=bf16", ["'computes=bf16'", "did you mean 'compute'"]),
        ("compute=bf61", ["'compute=bf61'", "expected one of", "did you mean 'bf16'"]),
        ("bf16,fp32", ["'fp32'", "not a role"]),
        ("compute=bf16,compute=fp16", ["given twice"]),
        ("scaling=maybe", ["none, dynamic, static"]),
        ("params=bf16,compute=fp32", ["autocast", "nearest: 'params=fp32,compute=fp32'"]),
        ("params=fp16,compute=fp16,scaling=dynamic", ["unscaled", "nearest: 'params=fp32,compute=fp16'"]),
    ],
)
def test_a_text_that_makes_no_policy_is_refused_with_the_nearest(spec, words):
    with pytest.raises(PrecisionError) as caught:
        PrecisionPolicy.parse(spec)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("spec", "facts", "words"),
    [
        ("bf16", OLD, ["bf16", "'cuda'", "nearest that works here: 'fp16'"]),
        ("fp16", BARE, ["torch.autocast does not compute fp16", "'mps'", "'no'"]),
        ("fp64", BARE, ["does not compute fp64", "'no'"]),
        ("bf16-true", OLD, ["does not compute bf16", "'fp16-true'"]),
        ("fp8", replace(CPU, fp8_libraries=()), ["torchao is not installed", "nearest that works here: 'bf16'"]),
        *(
            (
                replace(PrecisionPolicy.parse("fp8"), fp8=TERecipeKwargs(use_mxfp8_block_scaling=blocks)),
                CPU,
                [
                    "transformer_engine is not installed",
                    "nearest that works here: 'fp8' with AORecipeKwargs() (torchao)",
                ],
            )
            for blocks in (False, True)
        ),
    ],
)
def test_what_a_device_cannot_do_is_refused_with_what_it_can(spec, facts, words):
    with pytest.raises(PrecisionError) as caught:
        PrecisionPolicy.parse(spec, facts=facts)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_transformer_engine_needs_fp8_in_hardware():
    facts = DeviceFacts("cuda", fp8=False, fp8_libraries=("transformer_engine",))
    with pytest.raises(PrecisionError, match="Hopper"):
        PrecisionPolicy.parse("fp8", facts=facts, fp8=TERecipeKwargs())


def test_fp8_without_a_recipe_takes_the_library_that_is_there():
    hopper = DeviceFacts("cuda", fp8=True, fp8_libraries=("transformer_engine",))
    both = replace(hopper, fp8_libraries=("torchao", "transformer_engine"))
    assert isinstance(PrecisionPolicy.parse("fp8", facts=hopper).fp8, TERecipeKwargs)
    assert isinstance(PrecisionPolicy.parse("fp8", facts=both).fp8, AORecipeKwargs)


def test_an_fp8_recipe_goes_with_fp8_only():
    with pytest.raises(PrecisionError, match="AORecipeKwargs was given, but the precision is 'bf16'"):
        PrecisionPolicy.parse("bf16", fp8=AORecipeKwargs())


def test_a_policy_passes_through_parse():
    policy = PrecisionPolicy.parse("bf16")
    assert PrecisionPolicy.parse(policy, facts=CPU) == policy


def test_the_table_names_every_role():
    table = PrecisionPolicy.parse("params=fp32,compute=fp16,reduce=fp32").table()
    assert [line.split()[0] for line in table.splitlines()[1:]] == [
        *("params", "compute", "reduce", "buffers", "output", "scaling")
    ]
    assert "fp16 (autocast)" in table
    assert "torchao" in PrecisionPolicy.parse("fp8").table()


def test_autocast_context_is_that_of_the_policy():
    a = torch.ones(2, 2)
    with PrecisionPolicy.parse("bf16").autocast_context("cpu"):
        assert (a @ a).dtype is BF16
    with PrecisionPolicy.parse("fp64").autocast_context("cpu"):
        assert (a @ a).dtype is FP32


DTYPE_NAMES = st.sampled_from(["fp16", "bf16", "fp32", "fp64"])


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional={role: DTYPE_NAMES for role in ("params", "compute", "reduce", "output")}))
def test_the_name_of_a_policy_made_of_roles_reads_back_as_it(roles):
    spec = ",".join(f"{role}={name}" for role, name in roles.items())
    try:
        policy = PrecisionPolicy.parse(spec)
    except PrecisionError:
        return
    again = PrecisionPolicy.parse(policy.name)
    assert replace(again, name="") == replace(policy, name="")


FACTS = st.builds(
    DeviceFacts,
    type=st.sampled_from(["cpu", "cuda", "mps"]),
    computes=st.frozensets(st.sampled_from([FP16, BF16, FP64])).map(lambda found: found | {FP32}),
    autocasts=st.frozensets(st.sampled_from([FP16, BF16])),
    fp8=st.booleans(),
    fp8_libraries=st.sampled_from([(), ("torchao",), ("transformer_engine",), ("torchao", "transformer_engine")]),
)


@settings(deadline=None)
@given(FACTS, st.sampled_from(sorted(PrecisionPolicy.Named)))
def test_a_refusal_always_names_a_policy_that_works(facts, name):
    try:
        assert unsupported(resolve(PrecisionPolicy.Named[name], facts, recipe_given=False), facts) is None
    except PrecisionError as error:
        nearest = str(error).partition("nearest that works here: ")[2].split("'")[1]
        assert unsupported(PrecisionPolicy.Named[nearest], facts) is None
