"""Dispatched models: ties, moves, copies, memory, and maps that cannot be served."""

import copy
import logging

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_inference.dispatch.dispatch import dispatch_model
from accel_inference.dispatch.load import load_checkpoint_and_dispatch
from accel_inference.dispatch.offload import cpu_offload, cpu_offload_with_hook, disk_offload
from accel_inference.hooks.hook import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accel_inference.hooks.offloaded_state import get_state_dict_offloaded_model
from accel_inference.module_tensors.meta_init import init_empty_weights
from accel_inference.placement.auto_map import infer_auto_device_map
from accel_inference.placement.device_map import check_device_map
from accel_state.errors import CheckpointMismatchError

X = torch.ones(2, 3)
HALF = {"linear1": "disk", "batchnorm": "cpu", "linear2": "disk"}


@pytest.fixture
def model(three_layers):
    return three_layers().eval()


def test_one_device_needs_no_hooks_unless_asked(model):
    expected = model(X)
    assert dispatch_model(model, {"": "cpu"}) is model
    assert model.hf_device_map == {"": "cpu"}
    assert not hasattr(model, "_hf_hook")
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert hasattr(model, "_hf_hook")
    assert torch.equal(model(X), expected)


def test_a_model_is_complete_again_without_its_hooks(model, tmp_path):
    expected = model(X)
    dispatch_model(model, HALF, offload_dir=tmp_path)
    assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model.to("cpu")(X), expected)


class Tied(nn.Module):
    """Embeddings that are the head's weights, and a buffer that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, ids):
        return self.head(self.middle(self.embed(ids) + self.shift))


@pytest.mark.parametrize("way", ["cpu", "disk", "map"])
def test_tied_weights_are_one_parameter_again_without_hooks(way, tmp_path):
    model, ids = Tied(), torch.arange(5)[None]
    expected, names = model(ids), list(model.__dict__)
    if way == "map":
        places = {"embed": "disk", "middle": "cpu", "head": "disk", "shift": "cpu"}
        del dispatch_model(model, places, offload_dir=tmp_path).hf_device_map
    else:
        cpu_offload(model) if way == "cpu" else disk_offload(model, tmp_path)
    assert torch.equal(model(ids), expected)
    remove_hook_from_submodules(model)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model(ids), expected)
    assert list(model.__dict__) == names
    assert model.embed.weight.requires_grad


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("duplicate", [False, True])
def test_ties_across_devices_are_one_parameter_again_where_their_values_are_equal(trained, duplicate, tmp_path):
    model, ids = Tied(), torch.arange(5)[None]
    expected, names = model(ids), list(model.__dict__)
    places = {"embed": "cpu", "middle": "cpu", "head": "disk", "shift": "cpu"}
    del dispatch_model(model, places, offload_dir=tmp_path).hf_device_map
    assert torch.equal(model(ids), expected)
    assert model.head.weight is not model.embed.weight
    if duplicate:
        model = copy.deepcopy(model)
    if trained:  # which the file does not follow
        model.embed.weight.data.add_(1)
    before = model(ids)
    remove_hook_from_submodules(model)
    assert (model.head.weight is model.embed.weight) != trained
    assert torch.equal(model(ids), before)
    assert list(model.__dict__) == names


def test_hooks_of_the_user_stay_around_a_dispatch(model, tmp_path):
    expected, seen = model(X), []

    class Seeing(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(module)
            return args, kwargs

    for part in (model, model.batchnorm, model.linear1):
        add_hook_to_module(part, Seeing())
    dispatch_model(model, HALF, offload_dir=tmp_path)
    add_hook_to_module(model.linear2, Seeing(), append=True)
    assert torch.equal(model(X), expected)
    assert seen == [model, model.linear1, model.batchnorm, model.linear2]


@pytest.mark.slow
def test_a_compiled_model_computes_with_offloaded_weights(model, tmp_path):
    expected = model(X)
    disk_offload(model, tmp_path, resident_bytes=1)
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(X), expected)
    assert model.linear1.weight.is_meta


@pytest.mark.parametrize("dtype", [None, "bfloat16", torch.float64])
def test_weights_on_disk_say_the_dtype_in_which_they_compute(model, three_layers, dtype, tmp_path):
    save_file({name: tensor.half() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = three_layers().eval()
    places = {"linear1": "disk", "batchnorm": "cpu", "linear2": "disk"}
    loaded = load_checkpoint_and_dispatch(empty, tmp_path, places, offload_folder=tmp_path / "offload", dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float16
    assert {one.dtype for one in loaded.parameters()} == {wanted}
    assert loaded(X.to(wanted)).dtype is wanted


def test_moving_a_dispatched_model_warns_and_is_refused(model, tmp_path, caplog):
    dispatch_model(model, HALF, offload_dir=tmp_path)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RuntimeError, match="You can't move a model that has some modul"),
    ):
        model.to("cpu")
    assert "accelerate" in caplog.records[0].name
    caplog.clear()
    with pytest.raises(RuntimeError, match="You can't move"):
        model.to(torch.float16)
    assert not caplog.records


@pytest.mark.parametrize("offload", ["map", "cpu", "disk"])
@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.half(),
        lambda model: model.bfloat16(),
        lambda model: model.to(torch.float64),
        lambda model: model.type(torch.float16),
        lambda model: model.to("meta"),
        lambda model: model.cpu(),
        lambda model: model.to_empty(device="cpu"),
    ],
)
def test_what_would_convert_or_move_offloaded_weights_is_refused(model, convert, offload, tmp_path):
    expected = model(X)
    if offload == "map":
        dispatch_model(model, HALF, offload_dir=tmp_path)
    else:
        cpu_offload(model) if offload == "cpu" else disk_offload(model, tmp_path)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match=r"You can't move .*remove_hook_from_submodules"):
            convert(each)
        assert torch.equal(each(X), expected)
    assert model.float() is model
    remove_hook_from_submodules(model)
    assert torch.equal(model.half().float()(X), copy.deepcopy(model)(X))


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload, dispatch_model])
def test_a_state_dict_is_loaded_into_offloaded_weights_or_refused(model, offload, tmp_path):
    given = {name: 2 * value for name, value in model.state_dict().items()}
    options = {cpu_offload: (), disk_offload: (tmp_path,), dispatch_model: (HALF,)}
    offload(model, *options[offload], **({"offload_dir": tmp_path} if offload is dispatch_model else {}))
    before = model(X)
    with pytest.raises(RuntimeError, match=r"does not reach weights that are offloaded: linear1\.weight"):
        model.load_state_dict(given)
    assert torch.equal(model(X), before)
    model.load_state_dict(given, assign=True)
    assigned = model(X)
    assert not torch.equal(assigned, before)
    remove_hook_from_submodules(model)
    model.load_state_dict(given)
    assert torch.equal(model(X), assigned)


def test_a_deep_copy_computes_by_itself(model, tmp_path):
    expected = model(X)
    dispatch_model(model, HALF, offload_dir=tmp_path)
    made = copy.deepcopy(model)
    with torch.no_grad():
        made.batchnorm.weight.zero_()
    assert torch.equal(model(X), expected)
    assert not torch.equal(made(X), expected)


def test_ties_stay_and_are_read_once(tmp_path):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    for layer in model[1:]:
        layer.weight = model[0].weight
    x = torch.ones(1, 64)
    expected = model(x)
    disk_offload(model, tmp_path)
    assert torch.equal(model(x), expected)
    assert all(layer.weight is model[0].weight for layer in model)
    prefetcher = model[0]._hf_hook.weights_map.origin()[0].prefetcher(torch.device("cpu"))
    assert prefetcher.counts.bytes_read == 64 * 64 * 4


def test_a_module_whose_child_is_not_called_is_preloaded(tmp_path):
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 4)

        def forward(self, x):
            return x @ self.inner.weight.t() + self.inner.bias

    model = nn.Sequential(Outside())
    expected = model(X)
    disk_offload(model, tmp_path, preload_module_classes=["Outside"])
    assert torch.equal(model(X), expected)
    assert model[0].inner.weight.is_meta


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("way", ["cpu", "disk", "map"])
def test_attention_of_torch_has_its_projection_without_being_told(bias, way, tmp_path):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, bias=bias, batch_first=True).eval()
    x = torch.randn(2, 3, 4)
    expected = attention(x, x, x, need_weights=False)[0]
    if way == "cpu":
        cpu_offload(attention)
    elif way == "disk":
        disk_offload(attention, tmp_path)
    else:
        found = infer_auto_device_map(nn.Sequential(attention), {"cpu": 8}, clean_result=False)
        assert found == {"0": "disk"}
        dispatch_model(attention, {"": "disk"}, offload_dir=tmp_path)
    torch.testing.assert_close(attention(x, x, x, need_weights=False)[0], expected)


def test_a_disk_without_place_and_a_map_with_holes_are_refused(model):
    with pytest.raises(ValueError, match=r"We need an `offload_dir`.*linear1, linear2"):
        dispatch_model(model, HALF)
    with pytest.raises(ValueError, match=r"does not give any device.*linear2"):
        dispatch_model(model, {"linear1": "cpu", "batchnorm": "cpu"})


@pytest.mark.parametrize(
    ("places", "offloaded"),
    [
        ({"": "disk", "linear2": "cpu"}, {"linear1", "batchnorm"}),
        ({"": "disk", "linear1": "cpu", "linear2": "disk"}, {"batchnorm", "linear2"}),
        ({"": "cpu", "linear1": "disk"}, {"linear1"}),
    ],
    ids=["the head stays", "the first layer stays", "one layer is offloaded"],
)
def test_an_entry_of_a_module_overrides_that_of_the_one_around_it(model, places, offloaded, tmp_path):
    expected = model(X)
    dispatch_model(model, places, offload_dir=tmp_path)
    assert {name.partition(".")[0] for name, one in model.named_parameters() if one.is_meta} == offloaded
    assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), expected)


def test_a_map_may_leave_out_buffers_that_no_checkpoint_has(tmp_path):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", torch.rand(3), persistent=False)

        def forward(self, x):
            return x * self.frequencies

    model = nn.Sequential(Rotary(), nn.Linear(3, 2))
    expected = model(X)
    dispatch_model(model, {"1": "disk"}, offload_dir=tmp_path)
    assert model[1].weight.is_meta
    assert torch.equal(model(X), expected)
    model[0].register_buffer("offsets", torch.zeros(3))
    with pytest.raises(ValueError, match=r"does not give any device.*: 0\.offsets$"):
        check_device_map(model, {"1": "disk"})


def test_a_tensor_without_memory_and_weight_is_refused(three_layers, tmp_path):
    with init_empty_weights():
        model = three_layers()
    with pytest.raises(CheckpointMismatchError, match=r"linear1\.weight.* have no memory and no offloaded weight"):
        dispatch_model(model, HALF, offload_dir=tmp_path)


@pytest.mark.parametrize("device_map", ["auto", "balanced", "balanced_low_0", "sequential", {"": "disk"}, HALF, None])
def test_a_checkpoint_is_loaded_and_dispatched(model, three_layers, device_map, tmp_path):
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    stamp = (tmp_path / "model.safetensors").stat()
    with init_empty_weights():
        empty = three_layers().eval()
    made = load_checkpoint_and_dispatch(
        empty, tmp_path, device_map, max_memory={"cpu": 200}, offload_folder=tmp_path / "offload", strict=True
    )
    assert torch.equal(made(X), model(X))
    after = (tmp_path / "model.safetensors").stat()
    assert (after.st_mtime_ns, after.st_size) == (stamp.st_mtime_ns, stamp.st_size)
    state = get_state_dict_offloaded_model(made)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_loading_ends_an_earlier_dispatch(model, three_layers, tmp_path):
    expected = model(X)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = load_checkpoint_and_dispatch(three_layers(), tmp_path, HALF, offload_folder=tmp_path).eval()
    (tmp_path / "other.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    (tmp_path / "other.safetensors").replace(tmp_path / "model.safetensors")
    load_checkpoint_and_dispatch(loaded, tmp_path, HALF, offload_folder=tmp_path)
    assert torch.equal(loaded(X), expected)
    load_checkpoint_and_dispatch(loaded, tmp_path)
    assert torch.equal(loaded(X), expected)
    assert not hasattr(loaded, "hf_device_map")
    offloaded = cpu_offload(three_layers().eval())
    assert torch.equal(load_checkpoint_and_dispatch(offloaded, tmp_path)(X), expected)
    assert not any(hasattr(part, "_hf_hook") for part in offloaded.modules())
    assert torch.equal(loaded.to("cpu")(X), expected)


def test_an_unknown_way_and_missing_weights_are_refused(model, three_layers, tmp_path):
    save_file({"linear1.weight": model.linear1.weight.detach()}, tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = three_layers()
    with pytest.raises(ValueError, match=r"please choose 'auto', 'balanced'.*got 'best'"):
        load_checkpoint_and_dispatch(empty, tmp_path, "best")
    with pytest.raises(CheckpointMismatchError, match=r"lacks weights of the model: linear1\.bias"):
        load_checkpoint_and_dispatch(empty, tmp_path, {"": "cpu"})


def test_models_take_turns(three_layers):
    first, second = three_layers().eval(), three_layers().eval()
    expected = second(X)
    _, hook = cpu_offload_with_hook(first, "cpu")
    _, other = cpu_offload_with_hook(second, "cpu", prev_module_hook=hook)
    first(X)
    assert torch.equal(second(X), expected)
    hook.offload()
    other.remove()
    assert not hasattr(second, "_hf_hook")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("budget", [1, 3 * 256 * 256 * 4])
def test_memory_stays_within_the_budget_and_two_blocks(budget, tmp_path):
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    x = torch.ones(1, 256)
    expected = model(x)
    disk_offload(model, tmp_path, resident_bytes=budget)
    prefetcher = model[0]._hf_hook.weights_map.origin()[0].prefetcher(torch.device("cpu"))
    for _ in range(100):
        assert torch.equal(model(x), expected)
    assert prefetcher.counts.peak_bytes <= budget + 2 * 256 * 256 * 4
    assert prefetcher.counts.acquired == 800


def test_host_weights_are_not_copied(model):
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(X)
    cpu_offload(model, state_dict=weights)
    assert torch.equal(model(X), expected)
    weights["linear2.bias"].add_(1)
    torch.testing.assert_close(model(X), expected + 1)  # the sum is rounded in another order


def test_a_folder_with_another_models_weights_is_refused(model, three_layers, tmp_path):
    expected = model(X)
    disk_offload(model, tmp_path)
    other = three_layers().eval()
    for offload in (lambda: disk_offload(other, tmp_path), lambda: dispatch_model(other, HALF, offload_dir=tmp_path)):
        with pytest.raises(CheckpointMismatchError, match=r"linear1\.weight\.dat has other bytes"):
            offload()
    assert not any(parameter.is_meta for parameter in other.parameters())
    assert torch.equal(model(X), expected)


def test_models_with_the_same_weights_share_a_folder(model, tmp_path):
    expected = model(X)
    same = copy.deepcopy(model)
    disk_offload(model, tmp_path)
    dispatch_model(same, HALF, offload_dir=tmp_path)
    for each in (model, same):
        assert torch.equal(each(X), expected)


def test_two_checkpoints_share_a_folder_that_only_names_their_weights(three_layers, tmp_path):
    plain = [three_layers().eval() for _ in range(2)]
    made = []
    for index, each in enumerate(plain):
        save_file(each.state_dict(), tmp_path / f"{index}.safetensors")
        with init_empty_weights():
            empty = three_layers().eval()
        file = tmp_path / f"{index}.safetensors"
        made.append(load_checkpoint_and_dispatch(empty, file, {"": "disk"}, offload_folder=tmp_path / "offload"))
    for each, expected in zip(made, plain, strict=True):
        assert torch.equal(each(X), expected(X))


def test_a_checkpoint_does_not_take_what_it_lacks_from_the_folder(model, three_layers, tmp_path):
    disk_offload(model, tmp_path / "offload")
    state = {name: tensor for name, tensor in three_layers().state_dict().items() if name != "linear1.weight"}
    save_file(state, tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = three_layers().eval()
    with pytest.raises(CheckpointMismatchError, match=r"lacks weights of the model: linear1\.weight"):
        load_checkpoint_and_dispatch(
            empty, tmp_path / "model.safetensors", {"": "disk"}, offload_folder=tmp_path / "offload"
        )


def test_a_folder_with_weights_of_another_shape_is_refused(model, tmp_path):
    disk_offload(model, tmp_path)
    with init_empty_weights():
        wider = nn.Sequential()
        wider.linear1 = nn.Linear(3, 9)
    with pytest.raises(CheckpointMismatchError, match=r"linear1\.weight is \[4, 3\] among the offloaded weights"):
        disk_offload(wider, tmp_path)


@pytest.mark.parametrize("offload", ["disk", "map", "cpu"])
def test_buffers_that_are_not_offloaded_keep_what_forwards_write(three_layers, offload, tmp_path):
    model = three_layers().train()

    def offloaded():
        if offload == "disk":
            disk_offload(model, tmp_path, execution_device="cpu")
        elif offload == "map":
            dispatch_model(model, {"": "disk"}, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
        else:
            cpu_offload(model, "cpu")

    offloaded()
    with torch.no_grad():
        model(torch.randn(8, 3))
    assert not [one.name for one in tmp_path.iterdir() if "running" in one.name]
    remove_hook_from_submodules(model)
    assert int(model.batchnorm.num_batches_tracked) == 1
    assert float(model.batchnorm.running_mean.abs().max()) > 0
    offloaded()  # into the same folder, although the buffers have changed
    with torch.no_grad():
        model(torch.randn(8, 3))
    remove_hook_from_submodules(model)
    assert int(model.batchnorm.num_batches_tracked) == 2


def test_activations_are_for_an_inferred_map(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"device_map is \{'': 'cpu'\}; give one of auto, balanced"):
        load_checkpoint_and_dispatch(model, tmp_path, {"": "cpu"}, activations={"0": 8})
    for needed, place in ((8, "cpu"), (20, "disk")):  # beside 80 bytes of each layer
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        kwargs = {"max_memory": {"cpu": 172}, "offload_folder": tmp_path / "offload"}
        load_checkpoint_and_dispatch(model, tmp_path, "sequential", activations={"0": needed}, **kwargs)
        assert model.hf_device_map == {"": place}
