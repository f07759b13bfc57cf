"""Tensors of modules by name, ties, dtypes, and the meta device."""

import threading

import pytest
import torch
from torch import nn

from accel_inference.module_tensors.access import (
    get_non_persistent_buffers,
    id_tensor_storage,
    named_module_tensors,
    set_module_tensor_to_device,
)
from accel_inference.module_tensors.dtypes import convert_file_size_to_int, dtype_byte_size
from accel_inference.module_tensors.meta_init import init_empty_weights, init_on_device
from accel_inference.module_tensors.ties import find_tied_parameters, retie_parameters
from accel_state.enums import CustomDtype


def test_a_tensor_is_replaced_with_its_class_and_attributes():
    class Named(nn.Parameter):
        """A parameter that is known by its class."""

    layer = nn.Linear(3, 4)
    layer.weight = Named(layer.weight.detach(), requires_grad=False)
    layer.bias.tag = "kept"
    set_module_tensor_to_device(layer, "weight", "meta")
    set_module_tensor_to_device(layer, "bias", "meta")
    assert (type(layer.weight), layer.weight.requires_grad, layer.weight.is_meta) == (Named, False, True)
    assert layer.bias.tag == "kept"
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(4, 3, dtype=torch.float64))
    assert (type(layer.weight), layer.weight.dtype) == (Named, torch.float32)


class Own(torch.Tensor):
    """A class of tensors whose constructor takes a tensor only, and which has no ``new_empty``."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.new_empty:
            raise NotImplementedError
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_made_of_another_class_of_tensors_is_one_again(requires_grad):
    layer = nn.Linear(3, 4)
    layer.weight = nn.Parameter(Own(torch.zeros(4, 3)), requires_grad=requires_grad)
    layer.weight.tag = "kept"
    set_module_tensor_to_device(layer, "weight", "meta")
    assert (type(layer.weight), layer.weight.is_meta) == (Own, True)
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(4, 3))
    assert (type(layer.weight), layer.weight.requires_grad, layer.weight.tag) == (Own, requires_grad, "kept")
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.sum().item() == 12


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("weigth", None, "does not have a parameter or a buffer named weigth; it has: weight, bias"),
        ("a.weight", None, "has no attribute a"),
        (
            "weight",
            torch.ones(2, 2),
            r"shape torch.Size\(\[2, 2\]\) in \"weight\" \(which has shape torch.Size\(\[4, 3\]\)",
        ),
    ],
)
def test_a_wrong_name_or_shape_is_refused(name, value, words):
    with pytest.raises(ValueError, match=words):
        set_module_tensor_to_device(nn.Linear(3, 4), name, "cpu", value=value)


def test_a_tensor_without_memory_needs_a_value():
    with pytest.raises(ValueError, match="is on the meta device, we need a `value`"):
        set_module_tensor_to_device(nn.Linear(3, 4, device="meta"), "weight", "cpu")


def test_tensors_are_parameters_then_buffers(three_layers):
    model = three_layers()
    assert [name for name, _ in named_module_tensors(model.batchnorm)] == [
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked",
    ]  # fmt: skip
    assert list(named_module_tensors(model)) == []
    assert len(list(named_module_tensors(model, recurse=True))) == 9


def test_buffers_outside_the_state_dict_are_known_by_full_names(three_layers):
    model = three_layers()
    model.linear1.register_buffer("extra", torch.ones(1), persistent=False)
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"linear1.extra"}
    get_non_persistent_buffers(model.linear1).clear()
    assert get_non_persistent_buffers(model.linear1) == {"extra"}
    assert "linear1.extra" not in dict(named_module_tensors(model, recurse=True, remove_non_persistent=True))


def test_ties_are_found_and_made_again(three_layers):
    model = nn.Sequential(three_layers(), three_layers(), three_layers())
    assert find_tied_parameters(model) == []
    model[2].linear1.weight = model[0].linear1.weight
    model[1] = model[0]
    groups = find_tied_parameters(model)
    assert ["0.linear1.weight", "1.linear1.weight", "2.linear1.weight"] in groups
    model[2].linear1.weight = nn.Parameter(torch.zeros(4, 3, device="meta"))
    retie_parameters(model, groups)
    assert model[2].linear1.weight is model[0].linear1.weight
    assert not model[2].linear1.weight.is_meta


def test_shared_memory_has_one_identity():
    tensor = torch.ones(4)
    assert id_tensor_storage(tensor) == id_tensor_storage(tensor[2:])
    assert id_tensor_storage(tensor) != id_tensor_storage(tensor.clone())


@pytest.mark.parametrize(
    ("size", "expected"),
    [("1Gb", 125_000_000), ("1GB", 10**9), ("1GiB", 2**30), ("2KiB", 2048), ("0.5 MB", 500_000), (7, 7), ("7", 7)],
)
def test_sizes_are_read(size, expected):
    assert convert_file_size_to_int(size) == expected


@pytest.mark.parametrize("size", ["5", "5B"])
def test_bytes_need_no_unit(size):
    assert convert_file_size_to_int(size) == 5


@pytest.mark.parametrize("size", ["", "GB", "5XB", "-5GB", "5iB", "5G"])
def test_a_size_without_sense_is_refused(size):
    with pytest.raises(ValueError, match="not in a valid format"):
        convert_file_size_to_int(size)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, 4), ("bfloat16", 2), (torch.bool, 1 / 8), (torch.float8_e4m3fn, 1), (CustomDtype.INT4, 0.5)],
)
def test_bytes_of_a_dtype(dtype, expected):
    assert dtype_byte_size(dtype) == expected


@pytest.mark.parametrize("dtype", ["float31", "nn", 3])
def test_what_is_no_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match="not a valid dtype"):
        dtype_byte_size(dtype)


@pytest.mark.parametrize(("include", "expected"), [(None, "cpu"), (False, "cpu"), (True, "meta")])
def test_an_empty_model_has_shapes_only(include, expected, three_layers):
    with init_empty_weights(include_buffers=include):
        model = three_layers()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {expected}
    assert not nn.Linear(1, 1).weight.is_meta


def test_the_variable_decides_about_buffers(three_layers, monkeypatch):
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    with init_empty_weights():
        assert three_layers().batchnorm.running_mean.is_meta


def test_an_error_inside_ends_the_context_and_nesting_works():
    with pytest.raises(KeyError), init_empty_weights():
        raise KeyError
    with init_on_device("cpu"), init_empty_weights():
        assert nn.Linear(1, 1).weight.is_meta
    assert not nn.Linear(1, 1).weight.is_meta


def test_other_threads_build_as_usual():
    built = []
    with init_empty_weights():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(1, 1)))
        thread.start()
        thread.join()
    assert not built[0].weight.is_meta


def test_a_hundred_billion_parameters_take_no_memory():
    with init_empty_weights(include_buffers=True):
        model = nn.Sequential(*(nn.Linear(10_000, 10_000) for _ in range(1000)))
    assert sum(parameter.numel() for parameter in model.parameters()) > 10**11
