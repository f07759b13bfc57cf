"""Memory that a function takes on this rank, by torch's own count of its allocations."""

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

#: Prefixes of the methods of process groups that communicate.
_COLLECTIVES = ("all", "_allgather", "broadcast", "reduce", "_reduce", "gather", "scatter")


def peak_allocated(run: Callable[[], object]) -> int:
    """Peak bytes that ``run`` had allocated on the CPU beyond those before; the result of ``run`` is dropped.

    Tensors only, as torch's profiler records them: no interpreter, no memory-mapped files, no buffers of the
    collectives. Unlike resident memory, the number is the same from run to run.
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
    # Totals instead of sums of changes, because memory freed by the collectives' threads appears in the totals only.
    before = int(changes[0]["args"]["Total Allocated"]) - int(changes[0]["args"]["Bytes"])
    return max(int(change["args"]["Total Allocated"]) for change in changes) - before


def _is_allocation(event: dict[str, Any]) -> bool:
    return event.get("name") == "[memory]" and event.get("args", {}).get("Device Type") == 0


@contextmanager
def settled(pause: float = 0.02) -> Iterator[None]:
    """Makes the order of allocations within the block reproducible to the byte; slow, so not for timing.

    Garbage is collected before the block, and not within it. Each collective waits for its completion and then
    ``pause`` seconds, in which its threads release their copies of the sent tensors. If that is too short, on a busy
    machine, the measured memory is larger, never smaller.
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
