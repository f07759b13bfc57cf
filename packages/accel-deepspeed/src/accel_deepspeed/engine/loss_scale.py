"""State of DeepSpeed's loss scale and of its step counters, for checkpoints."""

from collections.abc import Mapping
from typing import Any, final

from accel_precision.errors import PrecisionError
from accel_precision.scaler import LossScaler

SCALE, TRACKER = LossScaler.SCALE, LossScaler.TRACKER
HYSTERESIS = "cur_hysteresis"
COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def scale_state(scaler: Mapping[str, Any]) -> dict[str, float | int]:
    """Returns scale and growth tracker of a dynamic loss scale, from DeepSpeed's attributes of it.

    After a full window without overflow, the scale grows at the next step.
    """
    stable = max(0, scaler["cur_iter"] - scaler["last_overflow_iter"] - 1)
    tracker = (stable - 1) % int(scaler["scale_window"]) + 1 if stable else 0
    return {SCALE: float(scaler["cur_scale"]), TRACKER: tracker}


@final
class EngineScale:
    """Loss scale of one fp16 engine, in the form of ``LossScaler.state_dict``, so that each loads the other's state.

    ``growth_tracker`` counts steps without overflow since the scale changed last. The number of overflows that
    DeepSpeed tolerates before it lowers the scale is in ``step_counts``.
    """

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        # A scaler object from stage 1 on, a record with the same attribute names at stage 0.
        self._scaler = optimizer.loss_scaler if hasattr(optimizer, "loss_scaler") else optimizer.loss_scale_config

    @property
    def _moves(self) -> bool:
        return bool(getattr(self._scaler, "dynamic", False) or getattr(self._scaler, "dynamic_loss_scale", False))

    def state_dict(self) -> dict[str, float | int]:
        """Returns plain numbers."""
        scaler = self._scaler
        if not self._moves:
            return {SCALE: float(scaler.cur_scale), TRACKER: 0}
        return {
            **scale_state(vars(scaler)),
            "growth_factor": scaler.scale_factor,
            "growth_interval": scaler.scale_window,
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Loads the scale and the counts; factors and windows stay as configured.

        Raises:
            PrecisionError: the state has no scale or no count.
        """
        missing = {SCALE, TRACKER} - set(state)
        if missing:
            raise PrecisionError(
                f"the state of the loss scale lacks {', '.join(sorted(missing))}; it holds {sorted(state)}"
            )
        scaler = self._scaler
        if not self._moves:
            return
        scaler.cur_scale = float(state[SCALE])
        scaler.cur_iter, scaler.last_overflow_iter = int(state[TRACKER]), -1


def step_counts(engine: Any) -> dict[str, int]:
    """Returns an engine's counters of taken and skipped steps, which its schedules, logs and own checkpoints use."""
    found = {name: int(getattr(engine, name)) for name in COUNTS}
    scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
    return found | ({HYSTERESIS: int(scaler.cur_hysteresis)} if hasattr(scaler, HYSTERESIS) else {})


def set_step_counts(engine: Any, counts: Mapping[str, int]) -> None:
    """Sets the counters that ``counts`` has."""
    for name in COUNTS:
        if name in counts:
            setattr(engine, name, int(counts[name]))
    scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
    if HYSTERESIS in counts and hasattr(scaler, HYSTERESIS):
        scaler.cur_hysteresis = int(counts[HYSTERESIS])
