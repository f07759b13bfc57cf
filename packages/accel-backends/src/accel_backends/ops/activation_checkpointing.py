"""Activation checkpointing: backward recomputes the activations of a model's blocks instead of keeping them.

Each block gets a subclass of its class, of the same name, whose ``forward`` runs in ``torch.utils.checkpoint``. The
tree of modules, names, types and hooks are unchanged, and hooks of the block itself run once. Wrappers and backends
that shard by module add their hooks outside of ``forward``, as for any block.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from typing import Any, Literal, final

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from accel_backends.ops.blocks import blocks_by_class
from accel_backends.private import RunningNorm, TorchDispatchMode
from accel_precision.autocast import subclass_with
from accel_precision.options import KwargsHandler
from accel_state.errors import BackendError, ConfigError, PrepareError, did_you_mean

Select = Callable[[str, nn.Module], bool]
Policy = Callable[..., Any]
Run = Callable[..., Any]

_SAVED = ("nothing", "matmuls")
# Operations of ``save="matmuls"``: those that cost most for the bytes that they return. Names that this torch lacks are
# left out.
_MATMULS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
# Option of torch 2.15's checkpoint: whether the caller's hooks of saved tensors see kept results. By default they see
# none in all of these versions; torch 2.15 warns that a later one changes this.
_KEPT_BY_HOOKS = "respect_saved_tensors_hooks"
RECOMPUTED = "_accel_recomputed"
"""Attribute of the classes of recomputed blocks."""
# Attribute of transformers' modules that recompute their blocks themselves.
_OF_TRANSFORMERS = "gradient_checkpointing"
# Method of transformers' KV caches, to which a second forward would add again.
_CACHE = "get_seq_length"
# Attribute of transformers' modules with the position of their block, by which a cache holds keys and values.
_LAYER = "layer_idx"


@final
@dataclass(frozen=True, slots=True)
class ActivationCheckpointing(KwargsHandler):
    """Which activations backward recomputes instead of keeping them.

    A recomputed block keeps its inputs, and runs forward a second time in backward, with the same random numbers and
    the same autocast: same gradients, less memory, about a third more computation. (Chen et al. 2016, "Training Deep
    Nets with Sublinear Memory Cost", arXiv:1604.06174; ``save`` as in torch's selective activation checkpointing.)

    Attributes:
        blocks: class names of the modules to recompute, or a function of a module's name and the module; None: the
            units of a backend that has them (FSDP), or the blocks that the model declares or repeats.
        every: recompute each n-th of these blocks, and keep the activations of the others.
        save: what a recomputed block keeps besides its inputs: ``"nothing"``, ``"matmuls"`` (results of matrix
            products, convolutions and attention, which cost most to recompute), or a policy of
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
        offload: keep the inputs of blocks in host memory, pinned; without effect where the host computes.
        preserve_rng_state: recompute with the random numbers of the forward; False saves time in blocks without
            dropout.

    Raises:
        ConfigError: ``every`` below one, or a name that ``save`` does not know.
    """

    blocks: Sequence[str] | Select | None = None
    every: int = 1
    save: Literal["nothing", "matmuls"] | Policy = "nothing"
    offload: bool = False
    preserve_rng_state: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.blocks, str):
            object.__setattr__(self, "blocks", (self.blocks,))
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"every is {self.every!r}; expected 1 (each block is recomputed) or a larger integer")
        if not callable(self.save) and self.save not in _SAVED:
            hint = did_you_mean(str(self.save), _SAVED)
            raise ConfigError(f"save is {self.save!r}; expected {', '.join(map(repr, _SAVED))}, or a policy{hint}")

    def find(self, model: nn.Module, default: Iterable[str]) -> list[str]:
        """Returns the names of the blocks that are recomputed; ``default``: blocks if the options select none; pure.

        Raises:
            PrepareError: there are none; no module has a given class; or the model recomputes its blocks already.
        """
        kind = type(model).__name__
        if any(getattr(module, _OF_TRANSFORMERS, False) for module in model.modules()):
            raise PrepareError(
                f"activation checkpointing was requested for {kind}, whose gradient_checkpointing_enable() was called, "
                "so its blocks would be recomputed twice; leave one of them out"
            )
        if self.blocks is None:
            found = list(default)
        elif callable(self.blocks):
            found = [name for name, module in model.named_modules() if name and self.blocks(name, module)]
        else:
            found = blocks_by_class(model, list(self.blocks))
        chosen = found[self.every - 1 :: self.every]
        if not chosen:
            has = f"it has {len(found)}, and every={self.every}" if found else "none are repeated, and none were named"
            raise PrepareError(
                f"activation_checkpointing: {kind} has no blocks to recompute: {has}; give "
                "ActivationCheckpointing(blocks=...) the class names of its blocks (for FSDP, "
                "transformer_cls_names_to_wrap or an auto_wrap_policy as well)"
            )
        return chosen

    def apply(self, model: nn.Module, names: Iterable[str]) -> None:
        """Makes the named blocks recompute their activations; a block that does so already is left as it is.

        Blocks of one class get one class, so that torch compiles their code once.

        Raises:
            PrepareError: a class that does not let instances change it.
        """
        made: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}
        for name in names:
            block = model.get_submodule(name)
            original = type(block)
            if hasattr(original, RECOMPUTED):
                continue
            try:
                kind = original, any(isinstance(module, RunningNorm) for module in block.modules())
                if kind not in made:
                    forward = _recomputed(original.forward, self._run(), normalises=kind[1])
                    made[kind] = subclass_with(original, {"forward": forward, RECOMPUTED: True})
                block.__class__ = made[kind]
            except TypeError as error:
                raise PrepareError(
                    f"{name} is a {original.__qualname__}, which does not let an instance change its class ({error}), "
                    "so it cannot be recomputed; call torch.utils.checkpoint.checkpoint in its forward instead"
                ) from error

    def _run(self) -> Run:
        """Returns the function that calls a block's forward so that backward repeats it."""
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.preserve_rng_state}
        if self.save != "nothing":
            kept = matmuls() if self.save == "matmuls" else self.save
            options["context_fn"] = partial(_selective_contexts, kept)
            if _KEPT_BY_HOOKS in signature(checkpoint).parameters:
                options[_KEPT_BY_HOOKS] = False
        run: Run = partial(checkpoint, **options)
        return _offloaded(run) if self.offload else run


def as_checkpointing(asked: object) -> ActivationCheckpointing | None:
    """Returns the options that a user asked for: ``True`` stands for the defaults, ``False`` and None for none.

    Raises:
        ConfigError: a value of another type.
    """
    if isinstance(asked, ActivationCheckpointing):
        return asked
    if asked is None or isinstance(asked, bool):
        return ActivationCheckpointing() if asked else None
    raise ConfigError(
        f"activation_checkpointing is {asked!r}; expected True, False or ActivationCheckpointing(blocks=..., save=...)"
    )


def matmuls() -> list[Any]:
    """Returns the operations whose results ``save="matmuls"`` keeps, of those that this torch has."""
    packets = [getattr(torch.ops.aten, name) for name in _MATMULS if hasattr(torch.ops.aten, name)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads() if overload != "out"]


def _recomputed(forward: Callable[..., Any], run: Run, *, normalises: bool) -> Callable[..., Any]:
    @wraps(forward)
    def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cached = any(hasattr(one, _CACHE) for one in (*args, *kwargs.values()))
        if not torch.is_grad_enabled() or (cached and not self.training):
            return forward(self, *args, **kwargs)
        once = normalises and not torch.compiler.is_compiling()  # compiled code updates statistics once
        compute = _with_statistics_once(forward, self) if once else forward
        if cached:
            args = tuple(_without_cache(self, one) for one in args)
            kwargs = {name: _without_cache(self, one) for name, one in kwargs.items()}
        if any(isinstance(one, torch.Tensor) for one in args):
            return run(partial(compute, self, **kwargs), *args)
        # torch looks for the device, whose random numbers and autocast it restores, among positional arguments only.
        names, count = tuple(kwargs), len(args)

        def call(*given: Any) -> Any:
            return compute(self, *given[:count], **dict(zip(names, given[count:], strict=True)))

        return run(call, *args, *kwargs.values())

    return recomputed


def _with_statistics_once(forward: Callable[..., Any], block: nn.Module) -> Callable[..., Any]:
    """Returns ``forward`` for a call and its recomputation, in which running statistics count no batch again."""
    norms = [module for module in block.modules() if isinstance(module, RunningNorm)]
    calls = 0

    def compute(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            return forward(*args, **kwargs)
        before = [dict(norm._buffers) for norm in norms]
        for norm in norms:  # backward needs those that the call has used, so the others are changed
            norm._buffers.update({name: one if one is None else one.clone() for name, one in norm._buffers.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            for norm, own in zip(norms, before, strict=True):
                norm._buffers.update(own)

    return compute


def _without_cache(block: nn.Module, argument: Any) -> Any:
    """Returns an argument of a block that trains, and None for an empty KV cache, which two forwards would fill twice.

    Raises:
        BackendError: a cache that holds keys and values, without which the block would compute something else.
    """
    length = getattr(argument, _CACHE, None)
    if length is None:
        return argument
    own = (getattr(module, _LAYER, None) for module in block.modules())
    if length(next((index for index in own if isinstance(index, int)), 0)) > 0:
        raise BackendError(
            f"a block whose activations are recomputed got a {type(argument).__name__} with keys and values, to which "
            "the second forward would add its own again; train without it, or leave activation_checkpointing out"
        )
    return None


def _selective_contexts(kept: Sequence[Any] | Policy) -> tuple[Any, Any]:
    """Context of a block's forward, which keeps results of operations, and of its recomputation, which returns them.

    torch's own context of the recomputation refuses operations that the forward did not run. Backends that gather
    parameters within a block (ZeRO-3) do that in the forward of another block if they gather in advance.
    """
    if torch.compiler.is_compiling():  # the compiler knows torch's contexts, and backends gather outside of its graphs
        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(kept)
        return contexts
    with_results: set[Any] = set()

    def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        choice = kept(context, operation, *args, **kwargs) if callable(kept) else operation in kept
        if choice in (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
            with_results.add(operation)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    forward, recomputation = create_selective_checkpoint_contexts(choose)
    return forward, _KeptResults(recomputation, with_results)


class _KeptResults(TorchDispatchMode):
    """Dispatch mode of a recomputation: torch's mode where operations have kept results; all others run as they are."""

    def __init__(self, context: TorchDispatchMode, operations: Collection[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._context, self._operations = context, operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._operations:
            return self._context.__torch_dispatch__(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _offloaded(run: Run) -> Run:
    """Returns ``run`` with the tensors that it saves, inputs of blocks, in pinned host memory until backward."""

    def offloaded(function: Callable[..., Any], *args: Any) -> Any:
        device = next((one.device.type for one in args if isinstance(one, torch.Tensor)), "cpu")
        if device == "cpu":
            return run(function, *args)
        with save_on_cpu(pin_memory=True, device_type=device):
            return run(function, *args)

    return offloaded
