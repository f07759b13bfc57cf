"""Starting the processes of a job: a plan that can be printed, and the runner that carries it out.

Names are imported on first use; torch is imported only where several machines have to find each other.
"""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

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
__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
