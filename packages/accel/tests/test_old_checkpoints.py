"""Checkpoints that earlier versions wrote are loaded, and the run goes on as it did then."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from accel import Accelerator
from accel_ckpt import open_checkpoint

DATA = Path(__file__).parent / "data"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(DATA))
    import make_run_0_1_0

    yield make_run_0_1_0
    sys.modules.pop("make_run_0_1_0", None)


def resumed(made: ModuleType, name: str, folder: Path) -> tuple[Accelerator, dict[str, object], dict[str, object]]:
    """The run after the checkpoint, and what it was when it was saved."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    objects = made.prepared(accelerator, accelerator.num_processes)
    if accelerator.is_main_process:
        shutil.copytree(DATA / "run_0_1_0" / name, folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    seen = made.trained(accelerator, objects, made.passes(objects[3]), made.AFTER)
    facts = made.facts(accelerator, objects, seen)
    return accelerator, facts, json.loads((DATA / "run_0_1_0" / f"{name}.json").read_text())


def check(facts: dict[str, object], expected: dict[str, object]) -> None:
    assert facts["samples"] == expected["samples"]
    weights = [torch.tensor(one["weight"], dtype=torch.float64) for one in (facts, expected)]
    torch.testing.assert_close(*weights, rtol=1e-10, atol=0)  # torch's kernels may round in another way


def test_a_run_of_one_process_goes_on(made: ModuleType, tmp_path: Path) -> None:
    accelerator, facts, expected = resumed(made, "one", tmp_path / "one")
    check(facts, expected)
    assert accelerator.last_load is not None
    assert accelerator.last_load.complete


@pytest.mark.ranks(2)
def test_a_run_of_two_processes_goes_on(made: ModuleType, tmp_path: Path) -> None:
    _, facts, expected = resumed(made, "two", tmp_path / "two")
    check(facts, expected)


def test_a_run_of_two_processes_goes_on_on_one(made: ModuleType, tmp_path: Path) -> None:
    accelerator, facts, expected = resumed(made, "two", tmp_path / "two")
    batches = facts["samples"]
    assert isinstance(batches, list)
    saved = expected["samples"]
    assert isinstance(saved, list)
    together = [sorted(one + other) for one, other in zip(*saved, strict=True)]
    assert [sorted(batch) for batch in batches[0]] == together
    assert accelerator.last_load is not None
    changes = [str(change) for change in accelerator.last_load.changes]
    assert "number of processes is 1 here and was 2 when it was saved" in changes


@pytest.mark.parametrize("name", ["one", "two"])
def test_every_byte_is_as_it_was_written(name: str) -> None:
    open_checkpoint(DATA / "run_0_1_0" / name).close()
