"""Starting the processes of a job: a plan that can be printed, and the runner that carries it out.

Names are imported on first use; torch is imported only where several machines have to find each other.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel.launch.host import HostFacts as HostFacts
    from accel.launch.host import read_host as read_host
    from accel.launch.planning import LaunchPlan as LaunchPlan
    from accel.launch.planning import ProcessPlan as ProcessPlan
    from accel.launch.planning import plan as plan
    from accel.launch.running import run as run

_MODULE_OF = {
    "HostFacts": "accel.launch.host",
    "LaunchPlan": "accel.launch.planning",
    "ProcessPlan": "accel.launch.planning",
    "plan": "accel.launch.planning",
    "read_host": "accel.launch.host",
    "run": "accel.launch.running",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
