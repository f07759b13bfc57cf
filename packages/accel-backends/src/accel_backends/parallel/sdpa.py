"""Attention over shards of sequences in the place of ``scaled_dot_product_attention``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from accel_backends.parallel.attention.exchanged import gathered_padding, nearest_degree, visible
from accel_backends.parallel.attention.rotary import see_full_lengths
from accel_backends.parallel.context_parallel import Context
from accel_state.errors import BackendError, PrepareError

_PLAIN_MASKS: Final = ("causal_mask_function", "bidirectional_mask_function")
_JOINED_MASKS: Final = ("and_masks", "packed_sequence_mask_function", "remap_positions_for_packed_sequence")
"""Functions of transformers that are masks, and those that make a mask for packed sequences of one."""


def apply_context_parallel(model: nn.Module, context: Context) -> None:
    """Replaces a transformers model's attention, in place, by attention over the shards of the ranks of ``context``.

    The model has to be called with shards (``Context.shard_batch``) from then on. It uses transformers' public registry
    of attention functions, so activation checkpointing and torch.compile see an ordinary function. Rotary embeddings
    get the frequencies of full sequences.

    Raises:
        PrepareError: a model that is not of transformers, whose attention is not scaled_dot_product_attention, or that
            has layers of another attention (sliding windows, linear attention).
    """
    check_context_parallel(model, context.method, context.mesh.size())
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"context_parallel_{context.method}_{context.group.group_name}_{context.balanced}"
    AttentionInterface.register(name, _transformers_attention(context))
    AttentionMaskInterface.register(name, _transformers_mask(context))
    cast(Any, model).set_attn_implementation(name)
    see_full_lengths(model, context.sharding, context.mesh.get_local_rank())


@contextmanager
def context_parallel_attention(context: Context) -> Iterator[None]:
    """Context in which ``F.scaled_dot_product_attention`` computes over the shards of the context-parallel group.

    It serves models that call the function themselves. The backward belongs into the context if activations are
    checkpointed, because they are then computed anew; on accelerators, where the backward has a thread of its own,
    checkpointed models need ``apply_context_parallel``.

    Raises:
        BackendError: masks, dropout, ``nn.MultiheadAttention`` (which calls no function that could be replaced), or no
            call of the function until the end, so that attention would have been within each shard only.
    """
    mode = _SdpaMode(context)
    with mode:
        yield
    if not mode.calls:
        raise BackendError(
            "no F.scaled_dot_product_attention was called in context_parallel_attention, so the model's attention saw "
            "one rank's shard of the sequence only; nearest: compute attention by that function"
        )


@final
class _SdpaMode(TorchFunctionMode):
    """Replaces the attention function, and refuses the one that has another inside."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return _attention(self.context, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            raise BackendError(
                "nn.MultiheadAttention in context_parallel_attention: it computes attention in one function; nearest: "
                "a module that projects queries, keys and values and calls F.scaled_dot_product_attention"
            )
        return func(*args, **kwargs)


def _attention(  # noqa: PLR0913 - the signature of torch's function
    context: Context,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` over shards, with its signature, and with a mask of padding."""
    if attn_mask is not None:
        raise BackendError(
            f"{context.kind} attention with a mask of shape {tuple(attn_mask.shape)}; expected none, or is_causal=True"
        )
    if dropout_p:
        raise BackendError(
            f"{context.kind} attention with dropout {dropout_p}, which is not supported; nearest: dropout_p=0.0 in "
            "attention"
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise BackendError(f"{query.shape[1]} heads of queries and {key.shape[1]} of keys; expected enable_gqa=True")
    return context.attention(query, key, value, causal=is_causal, scale=scale, padding=padding)


def _transformers_attention(context: Context) -> Callable[..., tuple[torch.Tensor, None]]:
    """Attention with transformers' interface: heads in dim 1 on the way in, in dim 2 on the way out."""

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        for option in ("sliding_window", "softcap", "position_bias", "s_aux"):
            if options.get(option) is not None:
                raise BackendError(
                    f"{type(module).__name__} calls attention with {option}={options[option]!r}, which "
                    f"{context.kind} attention does not compute; nearest: {context.without}"
                )
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        made = context.method == "ulysses" and attention_mask is not None and attention_mask.dtype is torch.bool
        padding, mask = (attention_mask, None) if made else (None, attention_mask)
        output = _attention(
            context, query, key, value, mask, dropout, causal, scale=scaling, enable_gqa=True, padding=padding
        )
        return output.transpose(1, 2).contiguous(), None

    return attend


def _transformers_mask(context: Context) -> Callable[..., torch.Tensor | None]:
    """Takes the place of transformers' construction of masks: attention itself is causal, and gets padding only."""

    def mask(*args: Any, attention_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | None:
        if options.get("local_size") is not None:
            raise BackendError(
                f"{context.kind} attention with a window of {options['local_size']} tokens; nearest: {context.without}"
            )
        if not torch.compiler.is_compiling() and (options.get("use_vmap") or not _is_plain(options["mask_function"])):
            raise BackendError(
                f"{context.kind} attention with a mask that is neither causal nor bidirectional, as of a prefix or of "
                f"images; nearest: {context.without}"
            )
        if attention_mask is not None and context.method == "ulysses":
            # One mask for all layers, as transformers makes it: each backward keeps that of its forward.
            causal = not bool(options["mask_function"](0, 0, 0, 1))
            return visible(gathered_padding(attention_mask, context.group), causal=causal)
        if attention_mask is None or bool(attention_mask.all()):
            return None
        raise BackendError(
            f"{context.kind} attention with padding (attention_mask has zeros); nearest: pad on the right, leave "
            "attention_mask out and label padding -100"
        )

    return mask


def _is_plain(mask: Callable[..., Any]) -> bool:
    """Whether a mask function of transformers is causal or bidirectional; that of packed sequences counts as such.

    Two chunks of one sequence look like packed sequences to transformers, because positions jump between them.
    """
    made_by = getattr(mask, "__qualname__", "").partition(".")[0]
    cells = [cell.cell_contents for cell in getattr(mask, "__closure__", None) or ()]
    inner = [one for cell in cells for one in (cell if isinstance(cell, tuple) else (cell,)) if callable(one)]
    return made_by in _PLAIN_MASKS or (made_by in _JOINED_MASKS and all(map(_is_plain, inner)))


def check_context_parallel(model: nn.Module, method: str, size: int, *, layers: int = 1) -> None:
    """Refuses models whose attention ``apply_context_parallel`` cannot replace; without communication.

    Args:
        method: as in ``Context``.
        size: number of ranks that hold shards of a sequence.
        layers: number of tensor-parallel ranks, among which the heads are divided before.

    Raises:
        PrepareError: as ``apply_context_parallel``, or ``ulysses`` has heads that the ranks do not divide.
    """
    kind, axis = ("sequence", "sp") if method == "ulysses" else ("context", "cp")
    if not hasattr(model, "set_attn_implementation"):
        raise PrepareError(
            f"{type(model).__name__} is no transformers model; nearest: the context manager "
            "context_parallel_attention, in which models that call F.scaled_dot_product_attention compute"
        )
    config: Any = model.config
    used = getattr(config, "_attn_implementation", None)
    if used != "sdpa" and not str(used).startswith("context_parallel_"):
        raise PrepareError(
            f"{type(model).__name__} computes attention by {used!r}, and {kind} parallelism replaces "
            'scaled_dot_product_attention; nearest: attn_implementation="sdpa"'
        )
    text = config.get_text_config()
    if any(_keeps_attention(module, (config, text)) for module in model.modules()):
        raise PrepareError(
            f"{type(model).__name__} chooses its attention when it is built, which {kind} parallelism cannot replace "
            f"then; nearest: {axis}_size=1"
        )
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    window = getattr(text, "sliding_window", None)
    if kinds or (window is not None and not getattr(text, "layer_types", None)):
        found = f"layers of {', '.join(sorted(kinds))}" if kinds else f"a sliding window of {window} tokens"
        raise PrepareError(
            f"{type(model).__name__} has {found}, which {kind}-parallel attention does not compute; nearest: "
            f"{axis}_size=1"
        )
    heads = getattr(text, "num_attention_heads", None)
    if method == "ulysses" and heads is not None and heads % (size * layers):
        each, among = max(1, heads // layers), "" if layers == 1 else f" after tp_size={layers}"
        raise PrepareError(
            f"{type(model).__name__} has {heads} heads of attention, which {size} sequence-parallel ranks do not "
            f"divide{among}; nearest: sp_size={nearest_degree(each, size)}, or cp_size={size}, which needs no heads"
        )


def _keeps_attention(module: nn.Module, configs: Sequence[Any]) -> bool:
    """Whether a model of transformers with one of these configs only logs ``set_attn_implementation``."""
    settable = getattr(type(module), "_can_set_attn_implementation", None)
    return settable is not None and any(module.config is one for one in configs) and not settable()
