"""Options of tensor parallelism under Accelerate's name."""

import logging

import pytest
import torch

from accel_compat.state.accelerator_state import SharedAcceleratorState
from accel_state import TorchTensorParallelPlugin
from accel_state.parallelism.axis_options import TorchTensorParallelConfig
from accel_testing import RankPool


def test_asynchronous_tensor_parallelism_is_ignored_with_a_warning(caplog):
    from accelerate.utils import TorchTensorParallelConfig as options_of

    with caplog.at_level(logging.WARNING):
        made = options_of(enable_async_tp=True)
    assert made == TorchTensorParallelConfig()
    assert "ignoring" in caplog.text


def train(degree: int) -> dict[str, torch.Tensor]:
    """A loop of Accelerate, whose tensor-parallel ranks read the same samples."""
    import accel_compat

    accel_compat.install()
    from accelerate import Accelerator
    from accelerate.utils import TorchTensorParallelPlugin as Plugin

    assert Plugin is TorchTensorParallelPlugin
    if degree > 1:
        with pytest.warns(FutureWarning, match=r"torch_tp_plugin is deprecated.*ParallelismConfig\(tp_size=2\)"):
            accelerator = Accelerator(cpu=True, torch_tp_plugin=Plugin(tp_size=degree))
        assert accelerator.parallelism_config.tp_size == degree
        assert accelerator.tensor_parallel_rank == accelerator.process_index
        assert accelerator.is_fsdp2
    else:
        accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)]
    model = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    SharedAcceleratorState._reset_state(reset_partial_state=True)
    return state


def test_a_loop_with_the_plugin_trains_as_one_process(rank_pool: RankPool) -> None:
    expected = rank_pool.run(train, 1, ranks=1)[0]
    found = rank_pool.run(train, 2, ranks=2)
    for name, value in expected.items():
        assert found[0][name].shape == value.shape
        assert float((found[0][name] - value).abs().max()) <= 1e-10, name


def test_degrees_that_contradict_the_plugin_are_refused() -> None:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import TorchTensorParallelPlugin as Plugin

    with pytest.warns(FutureWarning), pytest.raises(ValueError, match=r"has tp_size=4, and torch_tp_plugin says 2"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=4), torch_tp_plugin=Plugin(tp_size=2))
