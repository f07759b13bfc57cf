"""How much memory a piece of work takes on this rank, by torch's own account of what it allocates."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak_allocated(run: Callable[[], object]) -> int:
    """Bytes that ``run`` held allocated at most beyond what there was before, on the CPU; what it returns is let go.

    Tensors only, as torch's profiler saw them come and go: no interpreter, no files that are mapped into memory, no
    buffers of the collectives. It is the same from run to run, which resident memory is not.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    totals = [int(event["args"]["Total Allocated"]) for event in events if _is_allocation(event)]
    first = next((int(event["args"]["Bytes"]) for event in events if _is_allocation(event)), 0)
    # Totals and not sums of changes: what threads of the collectives let go of shows in the totals only.
    return max(totals, default=0) - (totals[0] - first if totals else 0)


def _is_allocation(event: dict[str, Any]) -> bool:
    return event.get("name") == "[memory]" and event.get("args", {}).get("Device Type") == 0
