"""Devices of this machine, and reasons why a required device is missing."""


def what_is_missing(kind: str, n: int = 2) -> str | None:
    """Reason why a test marked ``kind`` cannot run here; None if it can.

    ``kind`` is gpu, gpu_ranks, tpu, or multigpu with ``n`` devices.
    """
    if kind == "tpu":
        return _missing_tpu()
    import torch

    if kind == "gpu_ranks" and not torch.cuda.is_available():
        return f"needs a CUDA device; torch {torch.__version__} sees none"

    found = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    needed = n if kind == "multigpu" else 1
    if found >= needed:
        return None
    build = f"torch {torch.__version__}"
    device = torch.accelerator.current_accelerator()
    seen = f"{found} of type {device}" if device is not None and found else "none"
    return f"needs {needed} accelerator{'s' if needed > 1 else ''}; {build} sees {seen}"


def _missing_tpu() -> str | None:
    import importlib.util

    if importlib.util.find_spec("torch_xla") is None:
        return "needs a TPU; torch_xla is not installed"
    try:
        from torch_xla import runtime  # type: ignore[import-not-found,unused-ignore]

        kind = runtime.device_type()
    except Exception as error:  # torch_xla's error for a missing or busy device may be of any type
        return f"needs a TPU; torch_xla cannot open one: {error}"
    return None if kind == "TPU" else f"needs a TPU; torch_xla runs on {kind}"
