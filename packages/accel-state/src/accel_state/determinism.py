"""Switches of torch for deterministic algorithms."""

import logging
import os
from dataclasses import dataclass
from typing import final

import torch

_LOG = logging.getLogger(__name__)
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@final
@dataclass(frozen=True, slots=True)
class Determinism:
    """Values of torch's switches for deterministic computation."""

    algorithms: bool
    warn_only: bool
    fill_uninitialized: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool

    @classmethod
    def current(cls) -> "Determinism":
        """Returns the current values of the switches."""
        return cls(
            algorithms=torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            fill_uninitialized=torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            cudnn_deterministic=torch.backends.cudnn.deterministic,
            cudnn_benchmark=torch.backends.cudnn.benchmark,
        )

    def restore(self) -> None:
        """Sets torch's switches to these values."""
        torch.use_deterministic_algorithms(self.algorithms, warn_only=self.warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = self.fill_uninitialized  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark


def set_deterministic() -> Determinism:
    """Makes torch compute deterministically, or raise where it cannot; returns the previous values of the switches.

    Enables deterministic algorithms, disables cuDNN benchmarking and fills uninitialised memory. cuBLAS also needs
    ``CUBLAS_WORKSPACE_CONFIG`` in the environment before its first use. The variable is read here and never written; a
    warning is logged if it is missing. (https://docs.pytorch.org/docs/stable/notes/randomness.html)
    """
    before = Determinism.current()
    Determinism(
        algorithms=True, warn_only=False, fill_uninitialized=True, cudnn_deterministic=True, cudnn_benchmark=False
    ).restore()
    if torch.version.cuda is not None and os.environ.get(_CUBLAS) not in (":4096:8", ":16:8"):
        _LOG.warning(
            "deterministic computation on CUDA needs %s=:4096:8 in the environment of the process; it is %r",
            _CUBLAS,
            os.environ.get(_CUBLAS),
        )
    return before
