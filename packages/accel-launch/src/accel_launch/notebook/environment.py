"""The kind of notebook that an interpreter belongs to, and whether one process drives the whole machine."""

import sys
from collections.abc import Callable, Collection, Mapping

from accel_state.environment import parse_flag


def place_of(env: Mapping[str, str], loaded: Collection[str]) -> str:
    """``Colab``, ``Kaggle``, ``Jupyter`` or ``Python``, by variables of a service and the modules that are loaded.

    A token for Kaggle's own tools (``KAGGLE_KEY``) may stand in anybody's environment and says nothing.
    """
    if "google.colab" in loaded or env.get("COLAB_RELEASE_TAG"):
        return "Colab"
    if env.get("KAGGLE_KERNEL_RUN_TYPE"):
        return "Kaggle"
    return "Jupyter" if _has_kernel(loaded) else "Python"


def has_tpu(env: Mapping[str, str]) -> bool:
    """Whether the machine was set up for a TPU: ``TPU_NAME``, or ``PJRT_DEVICE=TPU``; and no CPU is asked for."""
    if parse_flag(env, "ACCELERATE_USE_CPU"):
        return False
    return bool(env.get("TPU_NAME")) or env.get("PJRT_DEVICE", "").upper() == "TPU"


def processes_for(wanted: int | None, place: str, count_accelerators: Callable[[], int]) -> int:
    """How many processes a call from ``place`` gets that asks for ``wanted`` of them.

    Colab's notebooks ask for as many as somebody's machine had; without a second GPU there they train in the one
    process that is there, as they do with Accelerate.
    """
    if wanted is not None and place != "Colab":
        return wanted
    found = count_accelerators()
    return max(1, found) if wanted is None or found < 2 else wanted


def _has_kernel(loaded: Collection[str]) -> bool:
    """Whether this is the process of a kernel, and not one that merely has Jupyter's packages."""
    if "ipykernel" not in loaded or "IPython" not in loaded:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")
