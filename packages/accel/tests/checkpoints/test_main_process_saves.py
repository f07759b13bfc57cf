"""``if accelerator.is_main_process: accelerator.save_state(...)`` under real launchers, with the hang watchdog on."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from accel_ckpt import open_checkpoint
from accel_testing.programs.runs import Finished, run_command, run_script

SAVES = """
import sys
import torch
from accel import Accelerator

folder, strategy, *endings = sys.argv[1:]
accelerator = Accelerator(cpu=True, strategy=strategy)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
for ending in endings:
    accelerator.backward(model(torch.ones(2, 8)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if accelerator.is_main_process:
        accelerator.save_state(f"{folder}/{ending}")
    if ending == "barrier":
        accelerator.wait_for_everyone()
    if ending == "gather":
        assert accelerator.gather(torch.ones(1)).sum() == accelerator.num_processes
    if ending == "load":
        for parameter in model.parameters():
            parameter.data.zero_()
        accelerator.load_state(f"{folder}/{ending}")
        assert all(map(torch.equal, before, model.parameters()))
accelerator.end_training()
print(f"rank {accelerator.process_index} is done", flush=True)
"""
ENDINGS = ("barrier", "load", "gather", "end")
LAUNCHERS = {
    "accel": ["-m", "accel", "launch", "--cpu", "--num_processes", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--log_dir", "logs", "--standalone", "--nproc_per_node", "2"],
}


def launched(folder: Path, launcher: str, strategy: str, endings: Sequence[str], script: str = SAVES) -> Finished:
    (folder / "train.py").write_text(script)
    command = [sys.executable, *LAUNCHERS[launcher], str(folder / "train.py"), str(folder), strategy, *endings]
    return run_command(command, cwd=folder)


@pytest.mark.parametrize("launcher", ["accel", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_the_others_go_on_to_whatever_comes_next(tmp_path: Path, launcher: str) -> None:
    finished = launched(tmp_path, launcher, "ddp", ENDINGS).check()
    assert finished.output.count("is done") == 2, finished.output
    for ending in ENDINGS:
        with open_checkpoint(tmp_path / ending) as saved:
            assert saved.world_size == 1
            assert {"model", "optimizer"} <= set(saved.names)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_each_next_operation_by_itself(tmp_path: Path, launcher: str, ending: str) -> None:
    launched(tmp_path, launcher, "ddp", [ending]).check()
    open_checkpoint(tmp_path / ending).close()


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("deepspeed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ending", ["barrier", *(pytest.param(one, marks=pytest.mark.slow) for one in ENDINGS[1:])])
def test_sharded_state_is_refused_by_name_on_every_rank(tmp_path: Path, strategy: str, ending: str) -> None:
    (tmp_path / "train.py").write_text(SAVES)
    finished = run_script(tmp_path / "train.py", str(tmp_path), strategy, ending, ranks=2).check_failed()
    reason = "rank 1 did not come to save_state, and it cannot do without them: each rank holds a part"
    assert reason in finished.outputs[0]
    if ending != "end":  # else rank 1 has ended by itself
        assert "rank 1 did not come to save_state" in finished.outputs[1]
    assert finished.seconds < 50, "nobody waits for a rank that is seen elsewhere"
    assert not (tmp_path / ending).exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_reports_the_refusal(tmp_path: Path, launcher: str) -> None:
    finished = launched(tmp_path, launcher, "fsdp", ["barrier"]).check_failed()
    assert "rank 1 did not come to save_state, and it cannot do without them" in finished.output
