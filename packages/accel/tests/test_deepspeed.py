"""DeepSpeed through an Accelerator: the same weights as one process, states that go anywhere."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from covertable import make

from accel_testing import RankPool
from accel_testing.equivalence.compare import assert_close_state
from accel_testing.equivalence.equivalence import assert_equivalent
from accel_testing.equivalence.program import Program, momentum_sgd
from accel_testing.equivalence.programs import adamw_program, sgd_program, train_part
from accel_testing.programs.runs import run_command

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "program"),
    [
        ("ds0:2/fp32/acc=3/weighted", sgd_program),
        pytest.param("ds1:2/fp32/acc=3/short", adamw_program, marks=pytest.mark.slow),
        pytest.param("ds2:2/fp32/acc=3/weighted", sgd_program, marks=pytest.mark.slow),
        ("ds3:2/fp32/acc=3/short", adamw_program),
        pytest.param("ds3:2/fp32", sgd_program, marks=pytest.mark.slow),
        pytest.param("ds0:2/bf16/acc=3", adamw_program, marks=pytest.mark.slow),
        pytest.param("ds1:2/bf16/acc=3", adamw_program, marks=pytest.mark.slow),
        ("ds2:2/bf16", adamw_program),
        pytest.param("ds3:2/bf16/acc=3", adamw_program, marks=pytest.mark.slow),
        pytest.param("ds2:1/fp32/acc=3", adamw_program, marks=pytest.mark.slow),
    ],
)
def test_training_equals_one_process(rank_pool: RankPool, layout: str, program: Callable[[], Program]) -> None:
    assert_equivalent(program, [layout], pool=rank_pool)


SCRIPT = """
import torch
from torch import nn
from accel_testing import Program

def train():
    return Program(nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), list(torch.randn(3, 8, 4)))
"""


@pytest.mark.slow
def test_a_script_of_the_user_is_checked_in_stages(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    layouts = "ds1:2/fp32/acc=2,ds3:2/fp32"
    done = run_command([sys.executable, "-m", "accel", "check", f"{script}:train", "--layouts", layouts])
    assert done.status == 0, done.output
    assert done.output.count(" ok") == 2
    assert "deepspeed:2/fp32/zero_stage=3" in done.output


AS_IT_IS = """
import torch
from torch import nn
from accel import Accelerator

accelerator = Accelerator(cpu=True, deepspeed_plugin={"zero_stage": 3})
model, optimizer = accelerator.prepare(model := nn.Linear(4, 1), torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
print("trained", accelerator.num_processes)
accelerator.end_training()
"""


def test_stage_3_trains_in_a_program_that_is_run_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(AS_IT_IS)
    done = run_command([sys.executable, str(script)])
    assert done.status == 0, done.output
    assert "trained 1" in done.output


# -------------------------------------------------------------------------------------------------- checkpoints


CHAINS = {
    "z3-fsdp-single-z2": ["ds3:2", "fsdp:2", "single:1", "ds2:2"],
    "z1-z3-z0-z2-z3": ["ds1:2", "ds3:2", "ds0:2", "ds2:1", "ds3:1"],
    "ddp-z2-ddp": ["ddp:2", "ds2:2", "ddp:2"],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_run_continues_in_any_stage_world_size_and_backend(
    rank_pool: RankPool, tmp_path: Path, chain: list[str]
) -> None:
    load = ""
    for number, layout in enumerate(chain):
        save = str(tmp_path / str(number))
        state = train_part(rank_pool, layout + "/acc=2", 6 * number, 6 * number + 6, load, save)
        load = save
    assert_close_state(state, train_part(rank_pool, "single/acc=2", 0, 6 * len(chain)))


# ------------------------------------------------------------------------------------------ operations on the host


def built(operation: str) -> bool:
    """Whether an operation is there already; building it takes longer than a test may."""
    from accel_deepspeed.library import extensions_folder

    return (extensions_folder() / operation / f"{operation}.so").exists()


needs_cpu_adam = pytest.mark.skipif(
    not built("cpu_adam"), reason="DeepSpeed's cpu_adam is not built; hatch run deepspeed-operations builds it"
)


@needs_cpu_adam
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("ds1:2/fp32/acc=3/weighted/offload_optimizer=cpu", marks=pytest.mark.slow),
        pytest.param("ds2:2/fp32/acc=3/offload_optimizer=cpu", marks=pytest.mark.slow),
        pytest.param("ds2:2/bf16/acc=3/offload_optimizer=cpu", marks=pytest.mark.slow),
        "ds3:2/fp32/acc=3/short/offload_optimizer=cpu/offload_param=cpu",
        pytest.param("ds3:2/bf16/offload_optimizer=cpu", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_training_with_the_optimizer_on_the_host_equals_one_process(rank_pool: RankPool, layout: str) -> None:
    assert_equivalent(adamw_program, [layout], pool=rank_pool)


@pytest.mark.sampled(1)
@needs_cpu_adam
@pytest.mark.parametrize(
    "chain",
    [
        ("ds3:2/offload_optimizer=cpu/offload_param=cpu", "ds2:2/offload_optimizer=cpu"),
        pytest.param(("fsdp:2", "ds2:2/offload_optimizer=cpu"), marks=pytest.mark.slow),
        pytest.param(("ds3:2/offload_optimizer=cpu", "ddp:2"), marks=pytest.mark.slow),
        ("ds1:2/offload_optimizer=cpu", "ds2:1"),
    ],
    ids=" to ".join,
)
def test_offloaded_states_go_on_elsewhere(rank_pool: RankPool, tmp_path: Path, chain: tuple[str, str]) -> None:
    before, after = (layout.replace(":2", ":2/acc=2").replace(":1", ":1/acc=2") for layout in chain)
    folder = str(tmp_path / "state")
    train_part(rank_pool, before, 0, 6, save=folder)
    state = train_part(rank_pool, after, 6, 12, folder)
    assert_close_state(state, train_part(rank_pool, "single/acc=2", 0, 12))


PROGRAMS = {"sgd": sgd_program, "adamw": adamw_program}
STAGES, WINDOWS = ("0", "1", "2", "3"), ("", "/acc=3", "/acc=3/weighted", "/acc=3/short")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "window", "precision", "program"),
    sorted(map(tuple, make([STAGES, WINDOWS, ("fp32", "bf16"), tuple(PROGRAMS)], strength=3))),
)
def test_any_three_values_train_as_one_process(
    rank_pool: RankPool, stage: str, window: str, precision: str, program: str
) -> None:
    assert_equivalent(PROGRAMS[program], [f"ds{stage}:2/{precision}{window}"], pool=rank_pool)


# ------------------------------------------------------------------------------------------------- an open window


@pytest.mark.parametrize("chain", [("ds2:2", "ds3:2"), ("ds3:2", "ds1:1"), ("ds0:2", "ds2:2")], ids="-".join)
@pytest.mark.sampled(1)
def test_a_window_that_was_open_goes_on(rank_pool: RankPool, tmp_path: Path, chain: tuple[str, str]) -> None:
    """A step of four micro-batches, of which the first two run before saving and the rest after loading."""
    before, after = (f"{layout}/acc=4" for layout in chain)
    folder = str(tmp_path / "open")
    train_part(rank_pool, before, 0, 2, save=folder, optimizer=momentum_sgd)
    state = train_part(rank_pool, after, 2, 4, folder, optimizer=momentum_sgd)
    assert_close_state(state, train_part(rank_pool, "single/acc=4", 0, 4, optimizer=momentum_sgd))
