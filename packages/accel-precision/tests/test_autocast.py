import copy
import io
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from accel_precision import (
    AutocastKwargs,
    PrecisionError,
    PrecisionPolicy,
    autocast_module,
    call_within,
    cast_parameters,
    is_swapped,
    plain_module,
    restore_module,
)

BF16 = PrecisionPolicy.parse("bf16")
Pair = namedtuple("Pair", ["left", "right"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.seen = self.linear(x).dtype
        return self.linear(x)


class Slotted(nn.Module):
    __slots__ = ("extra",)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.extra = "kept"

    @property
    def width(self):
        return self.linear.in_features

    def forward(self, x):
        return self.linear(x)


class Registered(nn.Module):
    registry: ClassVar[list[type]] = []

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Registered.registry.append(cls)


class Child(Registered):
    def forward(self, x):
        return x @ x


class Output(OrderedDict):
    """Like the outputs of Hugging Face models: a mapping whose entries are attributes, too."""

    def __getattr__(self, name):
        return self[name]


@dataclass
class Scored:
    score: torch.Tensor
    label: str


def x(*shape):
    return torch.randn(*(shape or (2, 4)))


@pytest.mark.parametrize("make", [Net, Slotted, lambda: nn.Sequential(nn.Linear(4, 4))], ids=["net", "slots", "torch"])
def test_calls_compute_under_autocast_and_give_fp32(make):
    model = make()
    forward, kind = model.forward, type(model)
    assert autocast_module(model, BF16, "cpu") is model
    assert model(x()).dtype is torch.float32
    assert isinstance(model, kind)
    assert model.forward == forward
    assert (type(model).__name__, type(model).__module__) == (kind.__name__, kind.__module__)
    assert next(model.parameters()).dtype is torch.float32


def test_compute_really_is_in_the_policys_dtype():
    model = autocast_module(Net(), BF16, "cpu")
    model(x())
    assert model.seen is torch.bfloat16


def test_slots_and_properties_survive():
    model = autocast_module(Slotted(), BF16, "cpu")
    assert (model.extra, model.width) == ("kept", 4)


def test_subclass_hooks_of_the_users_class_do_not_run():
    before = list(Registered.registry)
    autocast_module(Child(), BF16, "cpu")
    assert Registered.registry == before


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "copy", "pickle"],
)
@pytest.mark.parametrize("make", [Net, Slotted, Child])
def test_a_copy_is_of_the_original_class(copied, make):
    model = autocast_module(make(), BF16, "cpu")
    again = copied(model)
    assert type(again) is make
    assert is_swapped(model)


def test_torch_save_holds_the_original_class():
    model, file = autocast_module(Net(), BF16, "cpu"), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert type(again) is Net
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_pickle_needs_no_accel():
    text = pickle.dumps(autocast_module(nn.Linear(2, 2), BF16, "cpu"))
    assert b"accel" not in text


def test_state_dict_has_nothing_added():
    model = Net()
    names = list(model.state_dict())
    assert list(autocast_module(model, BF16, "cpu").state_dict()) == names


def test_restoring_gives_back_the_class_and_full_precision():
    model = autocast_module(Net(), BF16, "cpu")
    assert restore_module(model) is model
    assert type(model) is Net
    model(x())
    assert model.seen is torch.float32
    assert restore_module(model) is model


def test_a_plain_view_shares_everything_and_changes_nothing():
    model = autocast_module(Net(), BF16, "cpu")
    plain = plain_module(model)
    assert type(plain) is Net
    assert is_swapped(model)
    assert plain.linear is model.linear
    plain(x())
    assert plain.seen is torch.float32
    assert plain_module(plain) is plain


def test_contexts_nest_and_are_restored_together():
    entered = []

    class Noting:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append(self.name)

        def __exit__(self, *_):
            pass

    model = call_within(call_within(Net(), lambda m: Noting("inner")), lambda m: Noting("outer"))
    model(x())
    assert entered == ["outer", "inner"]
    assert type(pickle.loads(pickle.dumps(model))) is Net
    assert type(restore_module(model)) is Net


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_in_forward_leaves_autocast_off(error):
    class Raises(nn.Module):
        def forward(self, x):
            raise error

    with pytest.raises(error):
        autocast_module(Raises(), BF16, "cpu")(x())
    assert not torch.is_autocast_enabled("cpu")


def test_a_model_that_calls_itself_stays_under_autocast():
    class Recursive(Net):
        def forward(self, x, depth=2):
            y = self.linear(x)
            assert torch.is_autocast_enabled("cpu")
            return self(y, depth - 1) if depth else y

    assert autocast_module(Recursive(), BF16, "cpu")(x()).dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda t: t, lambda o: o),
        (lambda t: {"a": [t, 3]}, lambda o: o["a"][0]),
        (lambda t: (t, None), lambda o: o[0]),
        (lambda t: Pair(t, "text"), lambda o: o.left),
        (lambda t: Output(logits=t, names=["n"]), lambda o: o.logits),
        (lambda t: Scored(t, "l"), lambda o: o.score),
    ],
    ids=["tensor", "dict", "tuple", "namedtuple", "mapping", "dataclass"],
)
def test_outputs_are_widened_in_their_containers(wrap, unwrap):
    class Wraps(Net):
        def forward(self, x):
            return wrap(self.linear(x))

    plain = Wraps()(x())
    out = autocast_module(Wraps(), BF16, "cpu")(x())
    assert type(out) is type(plain)
    assert unwrap(out).dtype is torch.float32


def test_widening_can_be_switched_off():
    model = autocast_module(Net(), PrecisionPolicy.parse("bf16,output=none"), "cpu")
    assert model(x()).dtype is torch.bfloat16


def test_outputs_that_are_wide_are_the_same_objects():
    given = {"ids": torch.arange(3), "score": x().double()}

    class Gives(nn.Module):
        def forward(self):
            return given

    assert autocast_module(Gives(), BF16, "cpu")() is given


def test_autocast_options_reach_torch():
    model = autocast_module(Net(), BF16, "cpu", AutocastKwargs(enabled=False))
    model(x())
    assert model.seen is torch.float32


def test_a_true_policy_converts_parameters_buffers_and_inputs():
    policy = PrecisionPolicy.parse("bf16-true")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    parameters = list(model.parameters())
    autocast_module(cast_parameters(model, policy), policy, "cpu")
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    assert model[1].running_mean.dtype is torch.bfloat16
    assert model[1].num_batches_tracked.dtype is torch.int64
    assert model(x()).dtype is torch.bfloat16


def test_integers_are_no_inputs_to_convert():
    policy = PrecisionPolicy.parse("bf16-true")
    model = autocast_module(cast_parameters(nn.Embedding(4, 2), policy), policy, "cpu")
    assert model(torch.tensor([1, 2])).dtype is torch.bfloat16


def test_full_precision_leaves_a_module_alone():
    model = Net()
    assert type(autocast_module(model, PrecisionPolicy(), "cpu")) is Net


def test_gradients_flow_in_the_parameters_dtype():
    model = autocast_module(Net(), BF16, "cpu")
    model(x()).sum().backward()
    assert model.linear.weight.grad.dtype is torch.float32


def test_a_class_that_cannot_be_changed_is_named():
    class Final(type):
        def __new__(cls, name, bases, namespace):
            if any(isinstance(base, Final) for base in bases):
                raise TypeError("no subclasses")
            return super().__new__(cls, name, bases, namespace)

    class Sealed(nn.Module, metaclass=Final):
        pass

    with pytest.raises(PrecisionError, match=r"Sealed does not let an instance change its class \(no subclasses\)"):
        autocast_module(Sealed(), BF16, "cpu")


def test_hooks_run_inside():
    seen = []
    model = Net()
    model.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    autocast_module(model, BF16, "cpu")(x())
    assert seen == [True]


@pytest.mark.parametrize("compiled", ["wrapper", "in place", "before"])
def test_compiled_modules_compute_under_autocast(compiled):
    model = Net()
    if compiled == "before":
        model = torch.compile(model, backend="eager")
    model = autocast_module(model, BF16, "cpu")
    if compiled == "wrapper":
        model = torch.compile(model, backend="eager", fullgraph=False)
    if compiled == "in place":
        model.compile(backend="eager")
    inner = getattr(model, "_orig_mod", model)
    assert model(x()).dtype is torch.float32
    assert inner.seen is torch.bfloat16
    torch._dynamo.reset()
