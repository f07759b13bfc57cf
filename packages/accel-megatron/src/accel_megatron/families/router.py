"""Routers of megatron-core's mixtures of experts without Transformer Engine."""

from functools import partial
from typing import Any

import torch
from torch.nn import functional


def plain_router(**arguments: Any) -> Any:
    """Returns megatron-core's top-k router with a plain linear layer.

    megatron-core 0.16.1 computes the logits of experts by a function of Transformer Engine, whose name it does not
    define if that is not installed.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    router = TopKRouter(**arguments)
    router.gating = partial(_logits, router)
    return router


def _logits(router: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the logits of all experts for each token, in the dtype of ``hidden``."""
    return functional.linear(hidden, router.weight)
