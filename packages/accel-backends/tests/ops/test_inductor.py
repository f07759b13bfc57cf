"""Compiled by inductor, torch's own compiler, models train as they do uncompiled."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

from accel_backends import Backend, Bundle, DDPBackend, FSDPBackend, Run, TorchDynamoPlugin
from accel_precision import PrecisionPolicy
from accel_state import Session
from accel_state.environment import patch_environment
from accel_testing.equivalence.models import make_model

STEPS = 3


@contextmanager
def compiling() -> Iterator[None]:
    """From nothing, in this process alone, and leaving nothing."""
    import torch._dynamo
    import torch._inductor.config
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    try:
        with (
            TemporaryDirectory() as folder,
            patch_environment(TORCHINDUCTOR_CACHE_DIR=folder),
            # Precompiled headers are kept in a folder of all processes, whatever the variable says.
            torch._inductor.config.patch(compile_threads=1, cpp_cache_precompile_headers=False),
        ):
            yield
    finally:
        torch._dynamo.reset()
        os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)  # set by inductor


def train(backend: Backend, plugin: TorchDynamoPlugin | None) -> dict[str, torch.Tensor]:
    model = make_model("transformer")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model = backend.prepare(Bundle([model], [optimizer])).models[0]
    if plugin is not None:
        model = backend.compile(model, plugin)
    for step in range(STEPS):
        tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step + backend.session.rank))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        backend.backward(loss)
        backend.step(optimizer)
        optimizer.zero_grad()
    state = backend.states.full_model(model, main_only=False)
    return {name: value.detach().clone() for name, value in state.items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.ranks(2, timeout=900)
@pytest.mark.parametrize("kind", [DDPBackend, FSDPBackend], ids=["ddp", "fsdp"])
def test_inductor_trains_as_eager_does(kind: type[Backend]) -> None:
    """Whole and by regions: one graph for all blocks, of the full model more code; names stay the author's."""
    from torch._dynamo.utils import counters

    backend = kind(Run(Session.open(cpu=True), PrecisionPolicy()))
    expected = train(backend, None)
    for regional in (True, False):
        plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=regional)
        with compiling():
            trained = train(backend, plugin)
            assert counters["stats"]["unique_graphs"] >= 1
            compiled = counters["inductor"]
            assert sum(compiled[f"fxgraph_cache_{end}"] for end in ("miss", "hit", "bypass")) >= 1
        for name, value in trained.items():
            assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_inductor_compiles_one_device(single) -> None:
    """The same in one process."""
    from torch._dynamo.utils import counters

    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    x = torch.randn(2, 4)
    expected = model(x)
    backend = single()
    model = backend.prepare(Bundle([model])).models[0]
    with compiling():
        model = backend.compile(model, TorchDynamoPlugin(backend="inductor", use_regional_compilation=True))
        torch.testing.assert_close(model(x), expected)
        backend.backward(model(x).sum())
        assert counters["stats"]["unique_graphs"] == 2  # of three blocks: the first's input needs no gradient
    assert set(backend.states.model(model)) == {
        f"{block}.0.{name}" for block in range(3) for name in ("weight", "bias")
    }
