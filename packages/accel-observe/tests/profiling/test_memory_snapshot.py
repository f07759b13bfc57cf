"""Snapshots of memory that ran out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from accel_observe.profiling.memory_snapshot import write_snapshot
from accel_state.device.device import Device
from accel_state.device.functions import DeviceFunctions
from accel_state.device.kinds import DEVICE_KINDS, DeviceKind


def test_the_allocator_of_any_device_is_summarised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Functions(DeviceFunctions):
        def module(self, kind: DeviceKind) -> Any:
            return SimpleNamespace(memory_summary=lambda index: f"beads of {index}")

    monkeypatch.setitem(cast(Any, DEVICE_KINDS), "abacus", DeviceKind("abacus", "gloo", functions=Functions()))
    write_snapshot(tmp_path / "a.txt", MemoryError("no"), [], Device("abacus", 3))
    assert (tmp_path / "a.txt").read_text() == "MemoryError: no\n\n\nbeads of 3\n"
