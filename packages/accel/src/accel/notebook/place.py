"""Whether an interpreter runs on a machine with a TPU, which one process drives."""

from collections.abc import Mapping

from accel_state.environment import parse_flag


def has_tpu(env: Mapping[str, str]) -> bool:
    """Whether the machine was set up for a TPU: ``TPU_NAME``, or ``PJRT_DEVICE=TPU``; and no CPU is asked for."""
    if parse_flag(env, "ACCELERATE_USE_CPU"):
        return False
    return bool(env.get("TPU_NAME")) or env.get("PJRT_DEVICE", "").upper() == "TPU"
