"""Memory that a piece of work takes on this rank, by torch's own count of its allocations."""

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

#: How the methods of process groups that send something begin.
_COLLECTIVES = ("all", "_allgather", "broadcast", "reduce", "_reduce", "gather", "scatter")


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
    changes = sorted((event for event in events if _is_allocation(event)), key=lambda event: float(event["ts"]))
    if not changes:
        return 0
    # Totals and not sums of changes: what threads of the collectives let go of shows in the totals only.
    before = int(changes[0]["args"]["Total Allocated"]) - int(changes[0]["args"]["Bytes"])
    return max(int(change["args"]["Total Allocated"]) for change in changes) - before


def _is_allocation(event: dict[str, Any]) -> bool:
    return event.get("name") == "[memory]" and event.get("args", {}).get("Device Type") == 0


@contextmanager
def settled(pause: float = 0.02) -> Iterator[None]:
    """Within it, memory comes and goes in the same order in every run, to the byte; slowly, so not for timing.

    Cycles are collected before, and not within. A collective is over when its call returns, and its threads, which hold
    on to copies of what they send, have had so many seconds to let go of them; where that is too little, on a machine
    that others use, more is held and never less.
    """
    import torch.distributed as dist

    def finishing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            work = original(*args, **kwargs)
            if work is not None:
                work.wait()
            time.sleep(pause)
            return work

        return call

    names = [name for name in dir(dist.ProcessGroup) if name.startswith(_COLLECTIVES)]
    gc.collect()
    gc.disable()
    with ExitStack() as replaced:
        for name in names:
            original = getattr(dist.ProcessGroup, name)
            replaced.enter_context(patch.object(dist.ProcessGroup, name, finishing(original)))
        try:
            yield
        finally:
            gc.enable()
