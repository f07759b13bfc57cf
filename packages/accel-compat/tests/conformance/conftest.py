"""Programs of other libraries, run by ``accel launch --compat``."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"
_FOUND = importlib.util.find_spec("accelerate")
INSTALLED = Path(_FOUND.origin).resolve().parent if _FOUND is not None and _FOUND.origin else None
REASON = "Accelerate is not installed: hatch run conformance:test"
LIMIT = 400
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

Figures = dict[str, Any]


@pytest.fixture
def launched(tmp_path: Path) -> Callable[..., Figures]:
    """Runs a program in so many processes, and returns the figures of a client, once it has ended without Accelerate.

    With ``cpu=False`` the launcher says nothing about the device, because Accelerate leaves DeepSpeed out otherwise.
    """

    def run(processes: int, *program: str, cpu: bool = True) -> Figures:
        if INSTALLED is None:
            pytest.skip(REASON)
        record = tmp_path / "modules"
        launcher = ["-m", "accel", "launch", "--compat", "--num_processes", str(processes), *(["--cpu"] if cpu else [])]
        found = _figures(tmp_path, [*launcher, str(PROGRAMS / "watched.py"), str(INSTALLED), str(record), *program])
        loaded = [json.loads(line) for line in record.read_text().splitlines()]
        assert len(loaded) >= processes
        assert not any(loaded), "modules of the installed Accelerate were loaded"
        return found

    return run


def _figures(folder: Path, words: list[str], **variables: str) -> Figures:
    """What rank 0 printed about each variant of a client; nothing if the program is none."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, **variables, "HF_HOME": str(folder / "hub")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    said = [line for line in done.stdout.splitlines() if line.startswith("FIGURES ")]
    return dict(json.loads(line.removeprefix("FIGURES ")) for line in said)


@pytest.fixture(scope="session")
def accelerated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Figures]:
    """Figures of a client with the installed Accelerate, in one process or in several, which are computed once."""
    known: dict[tuple[int, tuple[str, ...]], Figures] = {}

    def run(*program: str, processes: int = 1) -> Figures:
        if INSTALLED is None:
            pytest.skip(REASON)
        if (processes, program) not in known:
            folder = tmp_path_factory.mktemp("accelerated")
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            words = [*(launcher if processes > 1 else ()), *program]
            known[processes, program] = _figures(folder, words, ACCELERATE_USE_CPU="true")
        return known[processes, program]

    return run
