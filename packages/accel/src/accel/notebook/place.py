"""Where this interpreter runs: a hosted notebook, a notebook, IPython, or none of them."""

import sys
from collections.abc import Collection, Mapping
from typing import Literal

Place = Literal["colab", "kaggle", "notebook", "ipython", "python"]

_SHELLS: Mapping[str, Place] = {"ZMQInteractiveShell": "notebook", "TerminalInteractiveShell": "ipython"}


def find_place(env: Mapping[str, str], modules: Collection[str], shell: str | None) -> Place:
    """What the variables, the imported modules and the name of IPython's shell say; pure."""
    if "google.colab" in modules or env.get("COLAB_RELEASE_TAG"):
        return "colab"
    if any(name.startswith("KAGGLE") for name in env):
        return "kaggle"
    return "python" if shell is None else _SHELLS.get(shell, "ipython")


def has_tpu(env: Mapping[str, str]) -> bool:
    """Whether the machine was set up for a TPU: ``TPU_NAME``, or ``PJRT_DEVICE=TPU``."""
    return bool(env.get("TPU_NAME")) or env.get("PJRT_DEVICE", "").upper() == "TPU"


def current_shell() -> str | None:
    """The name of the running IPython's shell, or None without IPython, which is not imported for this."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return None if shell is None else type(shell).__name__
