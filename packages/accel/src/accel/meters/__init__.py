"""Meters of a run: its time by phase, its speed, and its health."""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel.meters.flops import count_flops as count_flops
    from accel.meters.flops import peak_flops as peak_flops
    from accel.meters.health import LossWatch as LossWatch
    from accel.meters.health import Trouble as Trouble
    from accel.meters.meter import Meter as Meter
    from accel.meters.meter import Reading as Reading
    from accel.meters.phases import PHASES as PHASES
    from accel.meters.phases import PhaseClock as PhaseClock
    from accel.meters.progress import Progress as Progress
    from accel.meters.stragglers import Straggler as Straggler
    from accel.meters.stragglers import find_stragglers as find_stragglers

_EXPORTS = {
    "flops": ("count_flops", "peak_flops"),
    "health": ("LossWatch", "Trouble"),
    "meter": ("Meter", "Reading"),
    "phases": ("PHASES", "PhaseClock"),
    "progress": ("Progress",),
    "stragglers": ("Straggler", "find_stragglers"),
}
_PLACE_OF = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_PLACE_OF)
__getattr__, __dir__ = lazy_names(__name__, {name: f".{module}" for name, module in _PLACE_OF.items()})
