"""Load-balancing loss of a router over the tokens of all ranks."""

import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn

from accel_precision.convert import accumulation_dtype
from accel_state.errors import BackendError
from accel_state.logging import get_logger

_log = get_logger(__name__)

_FUNCTION = "load_balancing_loss_func"
"""Function of transformers that computes this loss, in the modules of models that have it."""
ROUTER_LOGITS, MASK = "output_router_logits", "attention_mask"


def load_balancing_loss(
    logits: Sequence[torch.Tensor], *, top_k: int, group: Any, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Loss of Switch Transformers (Fedus et al. 2021, arXiv:2101.03961, equation 4) for ``top_k`` choices per token.

    The loss is the number of experts times a sum over the experts. Each term is the product of two means over the
    tokens of all ranks and layers: the fraction of tokens that choose the expert, and the probability that the router
    gives it. The mean over ranks of each rank's own loss is another number, because each term is a product of means.

    The value is the same on every rank, in float32, or in float64 if the logits are. Gradients are those of one process
    once they are *averaged* over the ranks, which may have different numbers of tokens. Choices count whether or not a
    capacity drops them.

    Args:
        logits: of each layer's router, for this rank's tokens (tokens x experts).
        top_k: experts chosen for each token.
        group: ranks with other tokens; None: the default group.
        mask: 1 for tokens that count, 0 for padding, of as many elements as there are tokens; None: all count.

    Collective: every rank of the group must call this.
    """
    experts = logits[0].shape[-1]
    choices, probabilities, count = router_totals(logits, top_k=top_k, mask=mask)
    total = torch.cat([choices, probabilities.detach(), count])
    dist.all_reduce(total, group=group)
    share, mean = total[:experts] / total[-1], total[experts:-1] / total[-1]
    # The share of choices has no gradient; each rank's probabilities have their part of that of the mean.
    ours = experts * (share * probabilities).sum() * (dist.get_world_size(group) / total[-1])
    return ours + (experts * (share * mean).sum() - ours).detach()


def router_totals(
    logits: Sequence[torch.Tensor], *, top_k: int, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over tokens and layers: of choices and of probabilities (experts), and of tokens (1); without communication.

    ``logits``, ``top_k`` and ``mask`` are those of ``load_balancing_loss``. Sums of probabilities have gradients.
    """
    # Probabilities in the dtype of the logits, and sums in float32, are what transformers computes in one process.
    dtype, device = accumulation_dtype(logits[0].dtype), logits[0].device
    weights = None if mask is None else mask.reshape(-1, 1).to(device, dtype)
    choices = probabilities = torch.zeros(logits[0].shape[-1], dtype=dtype, device=device)
    count = torch.zeros(1, dtype=dtype, device=device)
    for one in logits:
        each = one.softmax(-1)
        weight = each.new_ones(len(each), 1, dtype=dtype) if weights is None else weights
        chosen = torch.zeros_like(each, dtype=dtype).scatter(1, each.detach().topk(top_k, dim=-1).indices, 1.0)
        choices = choices + (chosen * weight).sum(0)
        probabilities = probabilities + (each.to(dtype) * weight).sum(0)
        count = count + weight.sum()
    return choices, probabilities, count


def has_router_loss(model: nn.Module) -> bool:
    """Whether a model is one of transformers that computes its loss by ``load_balancing_loss_func``."""
    names = ("router_aux_loss_coef", "num_experts_per_tok", "num_experts")
    sources = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    return any(hasattr(one, _FUNCTION) for one in sources) and all(hasattr(model, name) for name in names)


def router_loss_asked(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a call with the arguments ``given``, by name, returns the loss of the routers."""
    asked = given.get(ROUTER_LOGITS)
    if asked is None:
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        asked = getattr(text, ROUTER_LOGITS, False)
    return bool(asked)


def sum_router_loss(model: nn.Module, group: Any, *, evaluation: Any = None) -> None:
    """Replaces a transformers model's load-balancing loss by that of the tokens of all ranks, where it returns one.

    The forward's ``aux_loss`` is replaced, and its part of ``loss``. That needs a model with ``router_aux_loss_coef``
    and ``num_experts_per_tok`` whose modeling file computes the loss by ``load_balancing_loss_func``. Other models keep
    the loss of each rank's own tokens, whose mean over ranks is trained, and so do losses that the user computes from
    the router's logits. Where a module within such a model has ``output_router_logits``, this logs a warning.

    Args:
        evaluation: group of ranks over whose tokens the loss is computed without gradients; None: ``group``. Ranks that
            evaluate other samples may have other numbers of batches, so they must not be in it unless the forward
            communicates with them anyway.

    Collective: every rank of the group must call the model, and every rank of ``evaluation`` without gradients.
    """
    if has_router_loss(model):
        # Registered before the hooks of ``fully_shard``, which have to see the tensors that the user receives.
        loss = _RouterLoss(model, group, group if evaluation is None else evaluation)
        model.register_forward_pre_hook(loss.hide, with_kwargs=True)
        cast(Any, model).base_model.register_forward_pre_hook(loss.restore, with_kwargs=True)
        model.register_forward_hook(loss.correct, with_kwargs=True)
    elif any(getattr(getattr(module, "config", None), ROUTER_LOGITS, False) for module in model.modules()):
        _log.warning(
            "the load-balancing loss of %s is computed from each rank's own tokens, not from those of all ranks; "
            "nearest: prepare a causal language model of transformers itself, or call router_loss.load_balancing_loss",
            type(model).__name__,
        )


@final
class _RouterLoss:
    """Hooks of one model that replace its load-balancing loss.

    The model computes the loss of this rank's tokens too, which is 0 / 0 if all of them are padding, as those of a
    shard of sequences may be. Neither its value nor its gradient could be subtracted then, so the model counts all
    tokens of such a rank, and only the layers see its mask.
    """

    def __init__(self, model: nn.Module, group: Any, evaluation: Any) -> None:
        self._group, self._evaluation = group, evaluation
        self._bind: Callable[..., Any] = signature(model.forward).bind_partial
        self._mask: torch.Tensor | None = None
        self._counted: torch.Tensor | None = None

    def hide(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Puts a mask of ones in the place of one of zeros."""
        self._mask = self._counted = None
        given: dict[str, Any] = self._bind(*args, **kwargs).arguments
        mask = given.get(MASK)
        if not isinstance(mask, torch.Tensor) or not router_loss_asked(model, given):
            return None
        self._mask, self._counted = mask, torch.where(mask.any(), mask, torch.ones_like(mask))
        return _replaced(args, kwargs, mask, self._counted)

    def restore(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gives the layers their mask."""
        if self._counted is None:
            return None
        if kwargs.get(MASK) is not None:  # perhaps converted by now: a unit of ``fully_shard`` does that
            return args, {**kwargs, MASK: self._mask}
        return _replaced(args, kwargs, self._counted, self._mask)

    def correct(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """Replaces the loss in the output."""
        given: dict[str, Any] = self._bind(*args, **kwargs).arguments
        mask, self._mask, self._counted = self._mask, None, None
        if not router_loss_asked(model, given):
            return output
        if getattr(output, "router_logits", None) is None or getattr(output, "aux_loss", None) is None:
            raise BackendError(
                f"{type(model).__name__} returned a {type(output).__name__} without router_logits and aux_loss, and "
                "its load-balancing loss is that of this rank's tokens only; nearest: return_dict=True, or "
                f"{ROUTER_LOGITS}=False"
            )
        group = self._group if torch.is_grad_enabled() else self._evaluation
        total = load_balancing_loss(output.router_logits, top_k=model.num_experts_per_tok, group=group, mask=mask)
        if output.loss is not None:
            output.loss = output.loss + model.router_aux_loss_coef * (total - output.aux_loss).to(output.loss.device)
        output.aux_loss = total
        return output


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], old: Any, new: Any) -> tuple[Any, dict[str, Any]]:
    """Arguments with one value in the place of another."""
    named = {name: new if one is old else one for name, one in kwargs.items()}
    return tuple(new if one is old else one for one in args), named
