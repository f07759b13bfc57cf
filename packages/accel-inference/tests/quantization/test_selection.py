"""Linear modules are quantized unless they are tied, the head, skipped or offloaded."""

import pytest
from torch import nn

from accel_inference.module_tensors.access import is_below
from accel_inference.quantization.config import TorchAOQuantizationConfig
from accel_inference.quantization.selection import get_keys_to_not_convert, quantized_modules


class Model(nn.Module):
    base_model_prefix = "body"

    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize(("tied", "kept"), [(True, ["embedding", "head"]), (False, ["head"])])
def test_tied_weights_and_the_head_keep_their_precision(tied, kept):
    assert get_keys_to_not_convert(Model(tied)) == kept
    assert list(quantized_modules(Model(tied), TorchAOQuantizationConfig(), None)) == ["body.0"]


def test_a_model_without_ties_and_base_is_quantized_in_full():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert get_keys_to_not_convert(model) == []
    assert list(quantized_modules(model, TorchAOQuantizationConfig(), None)) == ["0", "1"]


@pytest.mark.parametrize(
    ("places", "quantized"),
    [
        ({"": "cpu"}, ["0", "1"]),
        ({"0": "cpu", "1": "disk"}, ["0"]),
        ({"0": 0, "1": "cpu"}, ["0"]),
        ({"0": 0, "1": "disk"}, ["0"]),
    ],
)
def test_offloaded_modules_keep_their_precision(places, quantized):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert list(quantized_modules(model, TorchAOQuantizationConfig(), places)) == quantized


@pytest.mark.parametrize(
    ("name", "modules", "below"),
    [
        ("a.b.c", ["b"], True),
        ("a.b.c", ["a.b"], True),
        ("a.bc", ["b"], False),
        ("head", ["head"], True),
        ("x", [], False),
    ],
)
def test_modules_are_named_by_parts_of_their_path(name, modules, below):
    assert is_below(name, modules) is below
