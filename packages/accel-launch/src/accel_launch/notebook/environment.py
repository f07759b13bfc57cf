"""Kind of notebook that an interpreter belongs to, and whether one process drives all devices of the machine."""

import sys
from collections.abc import Callable, Collection, Mapping

from accel_state.environment import parse_flag


def place_of(env: Mapping[str, str], loaded: Collection[str]) -> str:
    """Returns ``Colab``, ``Kaggle``, ``Jupyter`` or ``Python``, by a service's variables and the loaded modules.

    A token for Kaggle's own tools (``KAGGLE_KEY``) may be set in any environment and is ignored.
    """
    if "google.colab" in loaded or env.get("COLAB_RELEASE_TAG"):
        return "Colab"
    if env.get("KAGGLE_KERNEL_RUN_TYPE"):
        return "Kaggle"
    return "Jupyter" if _has_kernel(loaded) else "Python"


def has_tpu(env: Mapping[str, str]) -> bool:
    """Whether the machine is set up for a TPU: ``TPU_NAME``, or ``PJRT_DEVICE=TPU``, and the CPU is not requested."""
    if parse_flag(env, "ACCELERATE_USE_CPU"):
        return False
    return bool(env.get("TPU_NAME")) or env.get("PJRT_DEVICE", "").upper() == "TPU"


def processes_for(wanted: int | None, place: str, count_accelerators: Callable[[], int]) -> int:
    """Number of processes for a call from ``place`` that requests ``wanted``.

    Colab's notebooks often request the number of their author's machine; without a second GPU they train in this
    process, as they do with Accelerate.
    """
    if wanted is not None and place != "Colab":
        return wanted
    found = count_accelerators()
    return max(1, found) if wanted is None or found < 2 else wanted


def _has_kernel(loaded: Collection[str]) -> bool:
    """Whether this is a kernel's process, rather than one that merely has Jupyter's packages loaded."""
    if "ipykernel" not in loaded or "IPython" not in loaded:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")
