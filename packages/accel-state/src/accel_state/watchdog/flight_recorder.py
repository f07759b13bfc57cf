"""torch's flight recorder: the last collectives of this process, as its backends recorded them."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

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
