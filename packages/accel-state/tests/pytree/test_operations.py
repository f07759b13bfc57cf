"""Nested values keep their containers, and only what has to change changes."""

import collections
import copy
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state.pytree import operations as nested
from accel_state.pytree.operations import (
    concatenate,
    convert_to_fp32,
    find_batch_size,
    find_device,
    flatten,
    get_data_structure,
    get_shape,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    is_container,
    is_namedtuple,
    leaves_of,
    listify,
    map_leaves,
    recursively_apply,
    refill,
    send_to_device,
    slice_tensors,
    unflatten,
    walk,
)

Pair = collections.namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Batch:
    x: object
    y: object = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: object
    y: object = 3


class Encoding(collections.UserDict):
    """Like a tokenizer's output: a mapping that moves itself, in place, and takes a device only."""

    def to(self, device):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Output(collections.OrderedDict):
    pass


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):
    """Like a model's output: a dataclass that is a mapping of the fields it was given."""

    loss: object = None
    logits: object = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


keys = st.one_of(st.text("abc", max_size=2), st.integers(0, 3))
leaves = st.one_of(st.integers(), st.none(), st.text(max_size=2), st.integers(0, 3).map(torch.arange))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda two: Pair(*two)),
        st.tuples(inner, inner).map(lambda two: Batch(*two)),
        st.tuples(inner, inner).map(lambda two: Frozen(*two)),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(collections.UserDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda items: collections.defaultdict(list, items)),
    ),
    max_leaves=8,
)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, collections.abc.Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(*both) for both in zip(a, b, strict=True))
    if dataclasses.is_dataclass(a):
        return same(a.x, b.x) and same(a.y, b.y)
    return a == b


@given(trees)
def test_unflatten_undoes_flatten(tree):
    found, structure = flatten(tree)
    assert same(unflatten(found, structure), tree)
    assert structure.num_leaves == len(found)


@given(trees)
def test_refill_undoes_leaves_of(tree):
    found = leaves_of(tree)
    assert all(a is b for a, b in zip(found, flatten(tree)[0], strict=True))
    assert same(refill(tree, iter(found)), tree)


@given(trees)
def test_walk_visits_the_leaves_in_the_same_order(tree):
    visited = list(walk(tree))
    assert all(leaf is found for (_, leaf), found in zip(visited, flatten(tree)[0], strict=True))
    assert len({path for path, _ in visited}) == len(visited)


@given(trees)
def test_mapping_the_identity_gives_an_equal_tree(tree):
    assert same(map_leaves(lambda leaf: leaf, tree), tree)


@given(trees)
def test_a_copy_has_an_equal_structure(tree):
    assert flatten(copy.deepcopy(tree))[1] == flatten(tree)[1]
    assert flatten([tree])[1] != flatten(tree)[1]


def test_the_order_in_which_a_dict_was_filled_does_not_matter():
    one, other = {"b": 1, "a": 2}, {"a": 2, "b": 1}
    assert flatten(one) == flatten(other)
    assert list(unflatten([20, 10], flatten(one)[1])) == ["b", "a"]


def test_keys_that_do_not_compare_stay_as_they_are():
    assert flatten({"a": 1, 2: 3})[0] == [1, 3]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_unflatten_wants_as_many_leaves_as_there_are_places(count):
    with pytest.raises(ValueError, match=f"{count} leaves given for a structure with 2 places"):
        unflatten(range(count), flatten([1, {"a": 2}])[1])


def test_a_path_reads_as_one_would_index():
    tree = {"labels": [Pair(1, Batch(2))]}
    assert [path for path, _ in walk(tree)] == ["['labels'][0].x", "['labels'][0].y.x", "['labels'][0].y.y"]


def test_a_defaultdict_keeps_its_factory():
    found = map_leaves(lambda leaf: leaf + 1, collections.defaultdict(list, a=1))
    assert found["new"] == []


class Named(dict):
    """Its constructor takes another argument first."""

    def __init__(self, name=None, **items):
        super().__init__(**items)
        if name is not None:
            self.name = name


class Attributes(dict):
    """Its items are its attributes."""

    def __init__(self, *args, **items):
        super().__init__(*args, **items)
        self.__dict__ = self


@pytest.mark.parametrize("data", [Named(a=1, b=2), Named("train", a=1, b=2), Attributes(a=1, b=2)], ids=repr)
@pytest.mark.parametrize("apply", [map_leaves, recursively_apply, None], ids=["map", "apply", "unflatten"])
def test_a_mapping_keeps_items_and_attributes(data, apply):
    if apply is None:
        leaves, structure = flatten(data)
        found = unflatten([leaf + 1 for leaf in leaves], structure)
    elif apply is map_leaves:
        found = map_leaves(lambda leaf: leaf + 1, data)
    else:
        found = recursively_apply(lambda leaf: leaf + 1, data, test_type=lambda leaf: isinstance(leaf, int))
    assert type(found) is type(data)
    assert dict(found) == {"a": 2, "b": 3}
    assert getattr(found, "name", None) == getattr(data, "name", None)
    assert dict(data) == {"a": 1, "b": 2}
    if isinstance(data, Attributes):
        assert (found.a, data.a) == (2, 1)


def test_a_dataclass_is_rebuilt_without_running_its_init():
    @dataclasses.dataclass
    class Once:
        x: int
        runs: list = dataclasses.field(default_factory=list, init=False)

        def __post_init__(self):
            self.runs.append(self.x)

    found = map_leaves(lambda leaf: leaf * 10, Once(1))
    assert (found.x, found.runs) == (10, [10])


def test_a_mapping_that_is_a_dataclass_is_given_its_fields():
    found = send_to_device(ModelOutput(logits=torch.ones(2)), "meta")
    assert type(found) is ModelOutput
    assert list(found) == ["logits"]
    assert found.logits.device.type == found["logits"].device.type == "meta"
    assert found.loss is None


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, True),
        (collections.UserDict(), True),
        (Pair(1, 2), True),
        (Batch(1), True),
        (Batch, False),
        (torch.ones(2), False),
        ("ab", False),
        (None, False),
        (torch.nn.Linear(1, 1), False),
    ],
)
def test_what_is_a_container(data, expected):
    assert is_container(data) is expected


def test_namedtuples_are_told_from_tuples():
    assert is_namedtuple(Pair(1, 2))
    assert not is_namedtuple((1, 2))
    assert not is_namedtuple(torch.ones(2, 2).max(0))


def test_honor_type_gives_a_namedtuple_its_items_by_position():
    assert honor_type(Pair(1, 2), (item for item in (3, 4))) == Pair(3, 4)


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_recursively_apply_names_what_it_does_not_support():
    with pytest.raises(TypeError) as caught:
        recursively_apply(torch.tensor, (torch.tensor(1), 1), error_on_other_type=True)
    assert str(caught.value) == (
        "Unsupported types (<class 'int'>) passed to `tensor`. Only nested list/tuple/dicts of objects that are valid "
        "for `is_torch_tensor` should be passed."
    )


MOVABLE = {
    "list": lambda x: [1, x],
    "tuple": lambda x: (x, {"a": x, "b": 3}),
    "namedtuple": lambda x: Pair(x, 1),
    "dict": lambda x: {"a": x, "b": [x, 2]},
    "OrderedDict": lambda x: Output(a=x),
    "UserDict": lambda x: collections.UserDict(a=x),
    "dataclass": lambda x: Batch(x),
    "frozen": lambda x: Frozen(x),
    "encoding": lambda x: Encoding(a=x),
}


@pytest.mark.parametrize("make", MOVABLE.values(), ids=MOVABLE)
def test_what_need_not_move_stays_the_same_object(make):
    data = make(torch.ones(2))
    assert send_to_device(data, "cpu") is data
    assert send_to_device(data, torch.device("cpu"), non_blocking=True) is data


@pytest.mark.parametrize("make", MOVABLE.values(), ids=MOVABLE)
@pytest.mark.parametrize("non_blocking", [False, True])
def test_what_moves_keeps_its_containers(make, non_blocking):
    data = make(torch.ones(2))
    moved = send_to_device(data, "meta", non_blocking)
    assert type(moved) is type(data)
    assert find_device(moved) == torch.device("meta")
    assert [leaf for leaf in leaves_of(moved) if isinstance(leaf, int)] == [
        leaf for leaf in leaves_of(data) if isinstance(leaf, int)
    ]


def test_only_what_moves_is_rebuilt():
    still = {"a": torch.ones(2, device="meta")}
    data = [still, torch.ones(2)]
    moved = send_to_device(data, "meta")
    assert moved[0] is still
    assert data[1].device.type == "cpu"


@pytest.mark.parametrize("skip", ["a", ["a"], ("a",)])
@pytest.mark.parametrize("kind", [dict, Encoding])
def test_skipped_keys_stay(skip, kind):
    moved = send_to_device(kind(a=torch.ones(2), b=torch.ones(2)), "meta", skip_keys=skip)
    assert (moved["a"].device.type, moved["b"].device.type) == ("cpu", "meta")


def test_a_type_error_inside_to_is_not_swallowed():
    class Broken:
        def to(self, device, non_blocking=False):
            raise TypeError("a bug of its own")

    with pytest.raises(TypeError, match="a bug of its own"):
        send_to_device(Broken(), "cpu")


def double(data):
    return send_to_device(data, "cpu"), convert_to_fp32(data)


@pytest.mark.parametrize("make", MOVABLE.values(), ids=MOVABLE)
@pytest.mark.sampled(3)
def test_the_compiler_sees_through(make):
    torch._dynamo.reset()
    moved, converted = torch.compile(double, fullgraph=True, backend="eager")(make(torch.ones(2).half()))
    assert type(moved) is type(make(1))
    assert nested.first_tensor(converted).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32_and_nothing_else_does(dtype):
    data = {
        "a": torch.ones(2, dtype=dtype),
        "b": torch.ones(2, dtype=torch.float64),
        "c": torch.ones(2).int(),
        "d": "x",
    }
    found = convert_to_fp32(data)
    assert [found[key].dtype for key in "abc"] == [torch.float32, torch.float64, torch.int32]
    assert found["d"] == "x"


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (torch.ones(4, 2), 4),
        ([torch.ones(3), torch.ones(4)], 3),
        ({"b": torch.ones(5), "a": torch.ones(1)}, 5),
        (Batch(({"x": torch.ones(2, 3)},)), 2),
    ],
)
def test_the_batch_size_is_that_of_the_first_tensor(data, size):
    assert find_batch_size(data) == ignorant_find_batch_size(data) == size


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ([], ValueError, "empty <class 'list'>"),
        ({}, ValueError, "empty <class 'dict'>"),
        ("a", TypeError, "<class 'str'>"),
        ([1, torch.ones(2)], TypeError, "<class 'int'>"),
        (torch.tensor(1.0), ValueError, "without dimensions"),
    ],
)
def test_no_batch_size_is_an_error_that_says_why(data, error, text):
    assert ignorant_find_batch_size(data) is None
    with pytest.raises(error, match=text):
        find_batch_size(data)


@pytest.mark.parametrize(
    ("data", "device"), [([1, "a", torch.ones(2)], "cpu"), ([1, "a"], None), ({"a": [torch.ones(1)]}, "cpu")]
)
def test_the_device_is_that_of_the_first_tensor(data, device):
    assert find_device(data) == (None if device is None else torch.device(device))


@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_listify_gives_python_lists(shape, dtype):
    data = torch.ones(shape, dtype=dtype)
    assert listify({"a": data, "b": 1}) == {"a": data.float().tolist(), "b": 1}


def test_a_structure_makes_empty_tensors_alike():
    data = {"a": torch.ones(2, 3, dtype=torch.int8), "b": [torch.tensor(1.0), "x"]}
    found = initialize_tensors(get_data_structure(data))
    assert get_shape(found) == get_shape(data) == {"a": [2, 3], "b": [[], "x"]}
    assert found["a"].dtype == torch.int8


def test_slices_are_taken_of_each_tensor():
    data = {"a": torch.arange(4), "b": (torch.arange(8).view(4, 2), "x")}
    found = slice_tensors(data, slice(1, 3), process_index=0, num_processes=2)
    assert found["a"].tolist() == [1, 2]
    assert found["b"][0].tolist() == [[2, 3], [4, 5]]
    assert found["b"][1] == "x"


def test_concatenate_joins_each_leaf():
    one = {"a": torch.ones(1, 2), "b": Pair(torch.zeros(2), [torch.ones(1)])}
    found = concatenate([one, one, one])
    assert get_shape(found) == {"a": [3, 2], "b": Pair([6], [[3]])}
    assert concatenate([torch.ones(1, 2), torch.ones(1, 3)], dim=1).shape == (1, 5)


@pytest.mark.parametrize("data", ["x", {"a": "x"}, [1, "x"], torch.ones(2)])
def test_a_list_of_one_is_its_element(data):
    assert concatenate([data]) is data


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ([{"a": "x"}, {"a": "y"}], TypeError, "Can only concatenate tensors but got <class 'str'>"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], ValueError, r"element 1 .*\['b'\].*\['a'\]"),
        ([torch.ones(1, 2), torch.ones(1, 3)], RuntimeError, "size"),
        ([], ValueError, "nothing to concatenate"),
    ],
)
def test_what_does_not_fit_is_not_concatenated(data, error, text):
    with pytest.raises(error, match=text):
        concatenate(data)
