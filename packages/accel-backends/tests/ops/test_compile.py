import copy

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DataParallel

from accel_backends import TorchDynamoPlugin, compile_model, compile_regions, model_state, repeated_blocks, unwrap
from accel_state import ConfigError


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x):
        return x + self.inner(x)


class Stack(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_the_default_compiles_nothing():
    model = Stack()
    assert compile_model(model, TorchDynamoPlugin()) is model
    assert not TorchDynamoPlugin().enabled


def test_the_full_model_goes_behind_torchs_wrapper_once():
    model, plugin = Stack(), TorchDynamoPlugin(backend="eager")
    compiled = compile_model(model, plugin)
    assert compiled._orig_mod is model
    assert compile_model(compiled, plugin) is compiled


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Stack, [f"blocks.{i}" for i in range(4)]),
        (lambda: Stack(depth=1), []),
        (lambda: nn.Linear(2, 2), []),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []),
        (lambda: nn.Sequential(Block(), Block()), ["0", "1"]),
        (lambda: nn.ModuleDict({"a": Stack(2), "b": Stack(2)}), [f"{s}.blocks.{i}" for s in "ab" for i in range(2)]),
        (lambda: nn.ModuleList(Stack(2) for _ in range(2)), ["0", "1"]),
    ],
    ids=["stack", "one block", "leaf", "leaves", "sequential", "two stacks", "nested"],
)
def test_repeated_blocks_are_found(make, names):
    assert repeated_blocks(make()) == names


def test_blocks_are_compiled_once_for_all_in_place_and_give_the_same():
    model = Stack()
    x = torch.randn(3, 4)
    expected, names = model(x), list(model.state_dict())
    assert compile_regions(model, TorchDynamoPlugin(backend="eager")) == [f"blocks.{i}" for i in range(4)]
    torch.testing.assert_close(model(x), expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert list(model.state_dict()) == names
    assert unwrap(model) is model


@pytest.mark.parametrize("make", [lambda: nn.Linear(2, 2), lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())])
def test_a_model_without_blocks_is_compiled_in_place(make):
    model = make()
    compile_regions(model, TorchDynamoPlugin(backend="eager"))
    model(torch.ones(1, 2))
    assert counters["stats"]["unique_graphs"] == 1


def test_blocks_of_torchs_own_classes_are_compiled_too():
    """Their ``compile()`` does nothing in torch 2.13; two graphs: the first block's input needs no gradient.

    Torch 2.9 shares no graph between these blocks.
    """
    model = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(4))
    other = copy.deepcopy(model).eval()
    compile_regions(model.eval(), TorchDynamoPlugin(backend="eager"))
    x = y = torch.randn(2, 3, 8)
    for own, reference in zip(model, other, strict=True):
        x, y = own(x), reference(y)
    torch.testing.assert_close(x, y)
    assert counters["stats"]["unique_graphs"] == (4 if Version(torch.__version__) < Version("2.10") else 2)


def test_compiled_blocks_copy_and_pickle():
    model = Stack()
    compile_regions(model, TorchDynamoPlugin(backend="eager"))
    again = copy.deepcopy(model)
    torch.testing.assert_close(again(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_regions_of_a_wrapped_model_are_those_of_the_model():
    model = Stack()
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    wrapped = DataParallel(model)
    assert compile_model(wrapped, plugin) is wrapped
    assert all(block._compiled_call_impl is not None for block in model.blocks)


def test_regional_training_matches_eager():
    model = Stack()
    other = copy.deepcopy(model)
    compile_regions(model, TorchDynamoPlugin(backend="aot_eager"))
    x = torch.randn(3, 4)
    for each in (model, other):
        each(x).square().mean().backward()
    for own, reference in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own.grad, reference.grad)


def layers(order):
    model = Stack()
    wrapped = model
    for layer in order:
        wrapped = DataParallel(wrapped) if layer == "d" else torch.compile(wrapped, backend="eager")
    return model, wrapped


@pytest.mark.parametrize("order", ["", "d", "c", "cd", "dc", "cdc", "ddc", "dcd"])
@pytest.mark.sampled(2)
def test_unwrapping_is_total_and_idempotent_in_any_order(order):
    model, wrapped = layers(order)
    assert unwrap(wrapped, keep_torch_compile=False) is model
    kept = unwrap(wrapped)
    assert unwrap(kept) is kept
    assert hasattr(kept, "_orig_mod") is ("c" in order)
    assert getattr(kept, "_orig_mod", kept) is model
    torch.testing.assert_close(kept(torch.ones(1, 4)), model(torch.ones(1, 4)))


@pytest.mark.parametrize("order", ["", "d", "c", "cd", "dc", "cdc"])
def test_names_in_states_are_free_of_wrappers_in_any_order(order):
    model, wrapped = layers(order)
    assert list(model_state(wrapped)) == list(model.state_dict())


def test_arguments_are_those_that_differ_from_torchs():
    plugin = TorchDynamoPlugin(backend="INDUCTOR", mode="reduce-overhead", use_regional_compilation=True)
    assert plugin.to_kwargs() == {"backend": "inductor", "mode": "reduce-overhead"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "reduce-overheads"}, "did you mean 'reduce-overhead'"),
        ({"mode": "default", "options": {"a": 1}}, "not both"),
    ],
)
def test_plugins_that_cannot_be_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        TorchDynamoPlugin(backend="inductor", **options)


@torch._dynamo.register_backend(name="accel_test_static_buffers")
def static_buffers(module, inputs, **options):
    """A compiler whose graphs return the same buffers in every run, as CUDA graphs do."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiled(graph, inputs):
        kept = []

        def run(*values):
            results = graph(*values)
            if not kept:
                kept.extend(one.clone() if isinstance(one, torch.Tensor) else one for one in results)
            for buffer, one in zip(kept, results, strict=True):
                if isinstance(one, torch.Tensor):
                    buffer.copy_(one)
            return [one.detach() if isinstance(one, torch.Tensor) else one for one in kept]

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compiled)(module, inputs)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_gradients_accumulate_over_graphs_that_reuse_their_buffers(mode):
    torch.manual_seed(0)
    model = Stack()
    expected = copy.deepcopy(model)
    batches = [torch.randn(3, 4) for _ in range(8)]
    compiled = compile_model(model, TorchDynamoPlugin("accel_test_static_buffers", mode=mode))
    for _ in range(2):
        for one in (compiled, expected):
            one.zero_grad()
            for batch in batches:
                one(batch).square().sum().backward()
        for mine, right in zip(compiled.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, right.grad)


def test_blocks_evaluated_one_after_another_are_one_step_of_the_graphs(monkeypatch):
    marks = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    model = compile_model(Stack(), TorchDynamoPlugin("eager", mode="reduce-overhead", use_regional_compilation=True))
    with torch.no_grad():
        model(torch.randn(3, 4))
        model(torch.randn(3, 4))
    assert len(marks) == 2
    first, _ = model(torch.randn(3, 4)), model(torch.randn(3, 4))  # the second would overwrite what the first saved
    assert len(marks) == 3
    first.sum().backward()
    model(torch.randn(3, 4))
    assert len(marks) == 4


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"backend": "cudagraphs"}, True),
        ({}, False),
    ],
)
def test_cuda_graphs_are_refused_where_parameters_are_freed(options, graphs):
    from accel_backends.ops.compile import refuse_cuda_graphs
    from accel_state import BackendError

    plugin = TorchDynamoPlugin(**{"backend": "inductor", **options})
    assert plugin.cuda_graphs is graphs
    if graphs:
        with pytest.raises(BackendError, match=r"strategy 'fsdp' allocates .* nearest: mode='max-autotune-no"):
            refuse_cuda_graphs(plugin, "fsdp")
    else:
        refuse_cuda_graphs(plugin, "fsdp")
