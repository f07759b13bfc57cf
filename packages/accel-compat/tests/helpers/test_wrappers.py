"""Wrapped models, tied sizes, trackers and local SGD under Accelerate's names."""

import importlib
import pickle

import pytest
import torch
from torch import nn

from accel_compat.facade.preparing import check_quantized
from accel_compat.helpers.models import get_module_size_with_ties
from accel_compat.helpers.tracking import LOGGER_TYPE_TO_CLASS, logged_values, register_tracker_class
from accel_compat.helpers.unwrap import extract_model_from_parallel


def test_a_forward_that_a_client_wrapped_is_restored():
    wrap = importlib.import_module("accelerate.utils").convert_outputs_to_fp32
    model = nn.Linear(1, 1)
    model._original_forward = model.forward
    model.forward = wrap(model.forward)
    restored = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert "forward" not in vars(restored)
    assert isinstance(pickle.loads(pickle.dumps(restored)), nn.Linear)


def test_tied_parameters_count_once():
    layers = list(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).named_children())
    sizes = {"0": 24, "1": 24, "1.weight": 16, "1.bias": 8}
    assert get_module_size_with_ties(["1.weight"], 24, sizes, layers[1:]) == (32, ["1"], [layers[1][1]])
    with pytest.raises(ValueError, match=r"2\.weight"):
        get_module_size_with_ties(["2.weight"], 24, sizes, layers)


def test_trackers_are_registered_replaced_and_removed():
    base = importlib.import_module("accelerate.tracking").GeneralTracker
    mine = type("Mine", (base,), {"name": "mine", "requires_logging_directory": False})
    known = dict(LOGGER_TYPE_TO_CLASS)
    register_tracker_class(mine)
    assert LOGGER_TYPE_TO_CLASS["mine"] is mine
    with pytest.warns(UserWarning, match="'mine' is replaced"):
        register_tracker_class(mine)
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(known)
    assert dict(LOGGER_TYPE_TO_CLASS) == known


def test_trackers_of_libraries_record_numbers_and_others_what_was_logged():
    values = {"loss": torch.tensor(1.0)}
    assert logged_values(type("Known", (), {"name": "wandb"})(), values) == {"loss": 1.0}
    assert logged_values(type("Own", (), {"name": "own"})(), values) is values


def test_local_sgd_of_one_process_counts_its_steps():
    accelerate = importlib.import_module("accelerate")
    local = importlib.import_module("accelerate.local_sgd").LocalSGD
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    with local(accelerator, model, local_sgd_steps=2) as block:
        block.step()
    assert (block.num_steps, block.enabled) == (1, False)


@pytest.mark.parametrize("places", [{"a": "cpu", "b": "disk"}, {"": "disk"}])
def test_offloaded_weights_of_4_or_8_bits_do_not_train(places):
    model = nn.Linear(1, 1)
    model.hf_device_map = places
    check_quantized(model)
    model.is_loaded_in_8bit = True
    with pytest.raises(ValueError, match="CPU or disk offload"):
        check_quantized(model)


def test_regions_are_compiled_in_place():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            return self.inner(x).tanh()

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()]), "head": nn.Linear(2, 2)})
    assert importlib.import_module("accelerate.utils").compile_regions_fsdp2(model, backend=backend) is model
    compiled = {name for name, one in model.named_modules() if one._compiled_call_impl is not None}
    assert compiled == {"blocks.0", "blocks.1", "head"}
    assert type(model["blocks"][0]) is Block
    for part in (*model["blocks"], model["head"]):
        part(torch.ones(1, 2))
    assert len(graphs) == 2  # one for both blocks, one for the head
