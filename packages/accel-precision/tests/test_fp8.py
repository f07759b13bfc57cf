import copy

import pytest
import torch
from torch import nn

from accel_precision import (
    AORecipeKwargs,
    DeviceFacts,
    Fp8Recipe,
    FP8RecipeKwargs,
    PrecisionError,
    PrecisionPolicy,
    TERecipeKwargs,
    autocast_module,
    installed_converters,
    load_converter,
    recipe_from_env,
)

NONE = DeviceFacts("cpu")
BOTH = DeviceFacts("cuda", fp8=True, fp8_libraries=("torchao", "transformer_engine"))


def test_both_converters_are_found_by_entry_point():
    assert {"torchao", "transformer_engine"} <= set(installed_converters())


@pytest.mark.parametrize(
    ("recipe", "words"),
    [(AORecipeKwargs(), "pip install torchao"), (TERecipeKwargs(), r"pip install transformer-engine\[pytorch\]")],
)
def test_a_missing_library_is_named(recipe, words):
    with pytest.raises(PrecisionError, match=words):
        load_converter(recipe, NONE)


def test_a_device_without_fp8_is_told_what_works():
    with pytest.raises(PrecisionError, match=r"Hopper.*AORecipeKwargs"):
        load_converter(TERecipeKwargs(), DeviceFacts("cpu", fp8_libraries=("transformer_engine",)))


def test_an_unknown_library_lists_those_that_are_there():
    class Other(Fp8Recipe):
        library = "torch_ao"

    with pytest.raises(PrecisionError, match=r"no fp8 converter 'torch_ao'; installed: .*did you mean 'torchao'"):
        load_converter(Other(), BOTH)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AORecipeKwargs(recipe="rowwize"), "'rowwize'.*did you mean 'rowwise'"),
        (lambda: AORecipeKwargs(recipe="rowwise", enable_fsdp_float8_all_gather=True), "only with recipe='tensorwise'"),
        (lambda: TERecipeKwargs(fp8_format="E3M4"), "fp8_format 'E3M4' is not one of HYBRID, E4M3, E5M2"),
        (lambda: TERecipeKwargs(amax_compute_algo="mean"), "most_recent, max"),
        (lambda: TERecipeKwargs(amax_history_len=0), "at least 1"),
        (lambda: TERecipeKwargs(use_mxfp8_block_scaling=True, amax_history_len=4), "no meaning"),
        (lambda: FP8RecipeKwargs(backend="MSAMP"), "no longer maintained.*AORecipeKwargs"),
        (lambda: FP8RecipeKwargs(backend="TEE"), "did you mean 'TE'"),
        (lambda: FP8RecipeKwargs(opt_level="O2"), "MS-AMP"),
        (lambda: FP8RecipeKwargs(backend="AO", margin=1), "margin: torchao has no such option"),
        (lambda: FP8RecipeKwargs(fp8_format="E3M4"), "'E3M4' is not one of"),
    ],
)
def test_recipes_refuse_what_cannot_be(make, words):
    with pytest.raises(PrecisionError, match=words):
        make()


def test_the_combined_handler_makes_the_recipe_it_names():
    assert FP8RecipeKwargs(backend="te", fp8_format="e4m3").recipe() == TERecipeKwargs(fp8_format="E4M3")
    assert FP8RecipeKwargs(amax_history_len=16).recipe() == TERecipeKwargs(amax_history_len=16)
    assert FP8RecipeKwargs().recipe() == AORecipeKwargs()
    assert PrecisionPolicy.parse("fp8", fp8=FP8RecipeKwargs(backend="TE")).fp8 == TERecipeKwargs()


@pytest.mark.parametrize(
    ("env", "recipe"),
    [
        ({}, None),
        ({"BACKEND": "NO", "MARGIN": "3"}, None),
        ({"BACKEND": "ao", "PAD_INNER_DIM": "false"}, AORecipeKwargs(pad_inner_dim=False)),
        ({"BACKEND": "TE"}, TERecipeKwargs()),
        (
            {
                "BACKEND": "TE",
                "FORMAT": "e4m3",
                "MARGIN": "2",
                "OVERRIDE_DGRAD": "1",
                "USE_AUTOCAST_DURING_EVAL": "yes",
            },
            TERecipeKwargs(
                fp8_format="E4M3",
                margin=2,
                override_linear_precision=(False, True, False),
                use_autocast_during_eval=True,
            ),
        ),
    ],
)
def test_a_launchers_variables_make_a_recipe(env, recipe):
    assert recipe_from_env({f"ACCELERATE_FP8_{name}": value for name, value in env.items()} | {"HOME": "/"}) == recipe


@pytest.mark.parametrize("env", [{"MARGIN": "two"}, {"OVERRIDE_WGRAD": "maybe"}, {"FORMAT": "E9"}])
def test_a_launchers_wrong_variable_is_named(env):
    with pytest.raises(PrecisionError, match=next(iter(env.values()))):
        recipe_from_env({f"X_{name}": value for name, value in {"BACKEND": "TE", **env}.items()}, "X_")


@pytest.fixture(scope="module")
def emulated():
    pytest.importorskip("torchao")
    return DeviceFacts.probe("cpu")


def net():
    torch.manual_seed(0)
    sizes = [(16, 32), (32, 48), (48, 50), (50, 32), (32, 32), (32, 8)]
    return nn.Sequential(*(layer for i, o in sizes for layer in (nn.Linear(i, o), nn.GELU())))


def converted(model):
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def test_first_last_and_indivisible_layers_stay(emulated):
    assert converted(load_converter(AORecipeKwargs(), emulated).convert(net())) == ["2", "8"]


def test_a_filter_of_the_users_decides_instead(emulated):
    recipe = AORecipeKwargs(module_filter_func=lambda module, name: name == "0")
    assert converted(load_converter(recipe, emulated).convert(net())) == ["0"]


def test_converting_twice_changes_nothing_more(emulated):
    model = load_converter(AORecipeKwargs(), emulated).convert(net())
    with pytest.warns(UserWarning, match="none of the"):
        assert converted(load_converter(AORecipeKwargs(), emulated).convert(model)) == ["2", "8"]


def test_subclasses_of_linear_keep_their_own_forward(emulated):
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(16, 16), Special(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    assert converted(load_converter(AORecipeKwargs(), emulated).convert(model)) == ["2"]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("policy", ["no", "bf16"])
def test_emulated_fp8_is_close_to_full_precision_and_trains(emulated, recipe, policy):
    """Bound of the relative error: 8 % (measured 1-5 %); e4m3 has 3 bits of mantissa."""
    model = net()
    weights = list(model.parameters())
    reference = copy.deepcopy(model)
    x = torch.randn(32, 16)
    model = load_converter(AORecipeKwargs(recipe=recipe), emulated).convert(model)
    autocast_module(model, PrecisionPolicy.parse(policy), "cpu")
    assert [id(p) for p in model.parameters()] == [id(p) for p in weights]
    out, expected = model(x), reference(x)
    assert float(((out - expected).norm() / expected.norm()).detach()) < 0.08
    out.square().mean().backward()
    expected.square().mean().backward()
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert float((own.grad - other.grad).norm() / other.grad.norm()) < 0.15


class Widen(nn.Module):
    """What CUDA's autocast does to the output of a norm, and the CPU's does not."""

    def forward(self, x):
        return x.float()


@pytest.fixture
def cuda_autocast():
    """The state of CUDA's autocast, which torchao's layers read, with bf16; torch keeps it without a GPU as well."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_products_in_hardware_under_the_autocast_of_a_gpu(emulated, cuda_autocast, recipe):
    """The CPU has the kernel of fp8 products that a GPU has: ``emulate`` is off, and full-precision inputs are cast."""
    facts = DeviceFacts("cuda", fp8=True, fp8_libraries=("torchao",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Widen(), nn.Linear(32, 48), Widen(), nn.Linear(48, 32))
    reference, x = copy.deepcopy(model), torch.randn(64, 32)
    converter = load_converter(AORecipeKwargs(recipe=recipe), facts)
    assert not converter.config().emulate
    model = converter.convert(model)
    assert converted(model) == ["2"]
    dtypes = []
    model[2].register_forward_hook(lambda module, args, output: dtypes.append((args[0].dtype, output.dtype)))
    out, expected = model(x), reference(x)
    assert dtypes == [(torch.float32, torch.bfloat16)]
    assert float(((out - expected).norm() / expected.norm()).detach()) < 0.08
    out.square().mean().backward()
    expected.square().mean().backward()
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert own.grad.dtype == torch.float32
        assert float((own.grad - other.grad).norm() / other.grad.norm()) < 0.15


def test_the_recipe_becomes_torchaos_config(emulated):
    config = load_converter(AORecipeKwargs(pad_inner_dim=False), emulated).config()
    assert (config.emulate, config.pad_inner_dim, config.enable_fsdp_float8_all_gather) == (True, False, False)
    assert load_converter(AORecipeKwargs(), emulated, sharded=True).config().enable_fsdp_float8_all_gather
    assert (
        not load_converter(AORecipeKwargs(recipe="rowwise"), emulated, sharded=True)
        .config()
        .enable_fsdp_float8_all_gather
    )


def test_a_config_of_the_users_is_emulated_where_it_has_to_be(emulated):
    from torchao.float8 import Float8LinearConfig

    assert load_converter(AORecipeKwargs(config=Float8LinearConfig()), emulated).config().emulate


@pytest.mark.gpu
@pytest.mark.parametrize("mxfp8", [False, True])
def test_transformer_engine_replaces_layers_and_trains(mxfp8):
    pytest.importorskip("transformer_engine")
    facts = DeviceFacts.probe("cuda")
    if not facts.fp8:
        pytest.skip("this GPU has no fp8")
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 10), nn.Linear(10, 32)).cuda()
    weights = list(model.parameters())
    converter = load_converter(TERecipeKwargs(use_mxfp8_block_scaling=mxfp8), facts)
    if mxfp8 and torch.cuda.get_device_capability() < (10, 0):
        with pytest.raises(PrecisionError, match="nearest"):
            converter.convert(model)
        return
    model = converter.convert(model)
    assert [type(module).__module__.startswith("transformer_engine") for module in model] == [True, True, False, False]
    assert [id(p) for p in model.parameters()] == [id(p) for p in weights]
    model(torch.randn(16, 32, device="cuda")).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in weights)
