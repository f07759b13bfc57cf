"""State of DeepSpeed's loss scale and of its step counters, for checkpoints."""

from collections.abc import Mapping
from typing import Any, ClassVar, final

from accel_precision.errors import PrecisionError
from accel_precision.scaler import LossScaler

SCALE, TRACKER = LossScaler.SCALE, LossScaler.TRACKER
HYSTERESIS = "cur_hysteresis"


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
    DeepSpeed tolerates before it lowers the scale is in ``EngineCounts``.
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


@final
class EngineCounts:
    """Step counters of an engine (taken and skipped), which its schedules, logs and own checkpoints use."""

    NAMES: ClassVar[tuple[str, ...]] = ("global_steps", "global_samples", "micro_steps", "skipped_steps")

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, int]:
        """Returns the counters by DeepSpeed's names."""
        found = {name: int(getattr(self._engine, name)) for name in self.NAMES}
        scaler: Any = getattr(self._engine.optimizer, "loss_scaler", None)
        return found | ({HYSTERESIS: int(scaler.cur_hysteresis)} if hasattr(scaler, HYSTERESIS) else {})

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Sets the counters that ``state`` has."""
        for name in self.NAMES:
            if name in state:
                setattr(self._engine, name, int(state[name]))
        scaler: Any = getattr(self._engine.optimizer, "loss_scaler", None)
        if HYSTERESIS in state and hasattr(scaler, HYSTERESIS):
            scaler.cur_hysteresis = int(state[HYSTERESIS])
