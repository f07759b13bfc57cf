"""Sequence parallelism between the blocks of a tensor-parallel model, as additions to its plan."""

from collections.abc import Iterator, Sequence

from torch import nn

from accel_backends.parallel.styles import (
    FusedColwise,
    GatherSequence,
    Rowwise,
    SequenceSharded,
    SplitSequence,
    Style,
)
from accel_state.errors import PrepareError

Found = tuple[str, Style, str]


def between_blocks(model: nn.Module, found: Sequence[Found]) -> list[Found]:
    """Choices that shard the sequence from the first block of the repeated list to the norm after the last.

    Korthikanti et al. 2022 (arXiv:2205.05198): where activations would be replicated, each rank holds a shard of every
    sequence. An all-gather before each sharded module and a reduce-scatter after it move as much as the all-reduce
    that they replace.

    Raises:
        PrepareError: the model has no list of blocks of norms and sharded modules, followed by one norm.
    """
    parent, listed = _list_of_blocks(model)
    blocks = f"{parent}.{listed}" if parent else listed
    names = [name for name in dict(model.get_submodule(blocks).named_children())]
    after = _norm_after(model.get_submodule(parent), listed)
    if after is None:
        raise PrepareError(
            f"{type(model).__name__} has no norm after its blocks {blocks}, where sequences would be gathered; "
            "nearest: sequence_parallel=False"
        )
    changed = [_scattering(one) if one[0].startswith(f"{blocks}.") else one for one in found]
    changed.append((f"{blocks}.{names[0]}", SplitSequence(), "every rank goes on with its shard of the sequence"))
    for name in names:
        changed.extend(_within_block(model, f"{blocks}.{name}", found))
    last = f"{parent}.{after}" if parent else after
    changed.append((last, SequenceSharded(gather_output=True), "norm after the blocks; gathers the sequences"))
    return changed


def _scattering(one: Found) -> Found:
    name, style, reason = one
    if isinstance(style, Rowwise):
        return name, Rowwise(style.input, scatter_sequence=True), f"{reason}; each rank gets its shard of the sequence"
    return one


def _within_block(model: nn.Module, block: str, found: Sequence[Found]) -> Iterator[Found]:
    """Styles of a block's own children: norms compute on shards, modules with sharded layers gather."""
    sharded = {name.removeprefix(f"{block}.").split(".")[0] for name, style, _ in found if _narrows(name, style, block)}
    for name, child in model.get_submodule(block).named_children():
        if name in sharded:
            yield f"{block}.{name}", GatherSequence(), "its layers are sharded and compute on full sequences"
        elif is_norm(child):
            yield f"{block}.{name}", SequenceSharded(), "norm, computes on shards of the sequence"
        elif any(True for _ in child.parameters()):
            raise PrepareError(
                f"{block}.{name} is a {type(child).__name__}, which is neither a norm nor made of sharded layers, so "
                "that shards of sequences cannot pass it; nearest: sequence_parallel=False"
            )


def _narrows(name: str, style: Style, block: str) -> bool:
    return name.startswith(f"{block}.") and isinstance(style, Rowwise | FusedColwise)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: a leaf with a weight of one dim and the word norm in the name of its class."""
    weight = module._parameters.get("weight")
    leaf = not any(True for _ in module.children())
    return leaf and weight is not None and weight.ndim == 1 and "norm" in type(module).__name__.lower()


def _list_of_blocks(model: nn.Module) -> tuple[str, str]:
    """Name of the module with the first list of at least two blocks of one class, and the list's name in it."""
    for name, module in model.named_modules():
        parent, _, own = name.rpartition(".")
        if isinstance(module, nn.ModuleList) and len({type(one) for one in module}) == 1 and len(module) > 1:
            return parent, own
    raise PrepareError(
        f"{type(model).__name__} has no list of two or more blocks, between which sequences would be sharded; nearest: "
        "sequence_parallel=False"
    )


def _norm_after(parent: nn.Module, listed: str) -> str | None:
    names = [name for name, _ in parent.named_children()]
    behind = names[names.index(listed) + 1 :]
    return next((name for name in behind if is_norm(parent.get_submodule(name))), None)
