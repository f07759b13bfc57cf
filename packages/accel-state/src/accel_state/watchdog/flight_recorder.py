"""torch's flight recorder: the last collectives of this process, as its backends recorded them."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, final

from accel_state.watchdog.diagnosis import STALLED

_SHOWN = 12


def flight_record() -> str:
    """Formats the last collectives of this process from torch's flight recorder, oldest first; empty if it has none.

    NCCL's recorder has the times at which the device began and ended each collective; without NCCL, torch records only
    enqueued collectives. ``TORCH_FR_BUFFER_SIZE=0`` disables the recorder.
    """
    from accel_state.private import flight_recorders

    for dump in flight_recorders():
        try:
            lines = list(flights(json.loads(dump()), now=time.time()))
        except (RuntimeError, ValueError) as error:
            return f"torch's flight recorder could not be read: {error}\n"
        if lines:
            return "\n".join(["the last collectives by torch's flight recorder:", *lines, ""])
    return ""


@final
class DeviceWait:
    """Wait of the main thread for a collective on a device, which shows as neither idleness nor an operation.

    A thread that waits for a CUDA device is busy, and a collective of NCCL returns to the program at once. A rank
    therefore waits if its main thread stays at one place, and the oldest collective that the device has not finished
    stays the same.
    """

    def __init__(self) -> None:
        self._place = ""
        self._placed = self._begun = 0.0
        self._oldest: object = None

    def since(self, place: str, now: float) -> float:
        """Returns the time since which the main thread, which is at ``place``, has waited; 0 if it does not."""
        if place != self._place:
            self._place, self._placed, self._oldest = place, now, None
        if now - self._placed < STALLED:
            return 0.0
        oldest = oldest_unfinished()
        if oldest != self._oldest:
            self._oldest, self._begun = oldest, now
        return self._begun if oldest is not None and now > self._begun else 0.0


def oldest_unfinished() -> tuple[object, ...] | None:
    """Returns what identifies the oldest collective that the device has not finished, or None if there is none."""
    from accel_state.private import device_flight_recorder

    dump = device_flight_recorder()
    try:
        entries = [] if dump is None else json.loads(dump()).get("entries") or []
    except (RuntimeError, ValueError):
        return None
    for entry in entries:
        if not entry.get("retired"):
            return tuple(str(entry.get(key)) for key in ("process_group", "collective_seq_id", "p2p_seq_id", "op_id"))
    return None


def flights(record: Mapping[str, Any], *, now: float) -> Iterator[str]:
    """Formats the newest entries of a flight recorder's JSON (version 2), one line each; ``now`` in seconds."""
    for entry in list(record.get("entries") or [])[-_SHOWN:]:
        number = entry.get("collective_seq_id") or entry.get("p2p_seq_id")
        kinds = zip(entry.get("input_dtypes", ()), entry.get("input_sizes", ()), strict=False)
        tensors = ", ".join(f"{kind}{sizes}" for kind, sizes in kinds)
        state = "done" if entry.get("retired") else entry.get("state", "unknown")
        ago = max(0.0, now - entry.get("time_created_ns", 0) / 1e9)
        group = (entry.get("process_group") or ["", ""])[-1]
        yield f"  #{number} {entry.get('profiling_name')}({tensors}) in {group}: {state}, begun {ago:.1f} s ago"
