"""Comparison of the models and optimizers of all ranks, because the collectives of different models would hang."""

from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_backends.ops.fqn import find_fsdp1, named_parameters
from accel_precision.policy import dtype_name
from accel_state.errors import PrepareError

if TYPE_CHECKING:
    from accel_backends.core.bundle import Bundle


def compare_bundles(bundle: "Bundle", *, group: Any, apart: Collection[int] = ()) -> None:
    """Refuses ranks that prepare different models or optimizers.

    ``apart``: ids of parameters of which ranks have other numbers, because they were prepared before.

    Collective: every rank of the group must call this.

    Raises:
        PrepareError: see ``check_same``.
    """
    from accel_state.collectives.objects import all_gather_object

    mine: list[str] = []
    for model in bundle.models:
        cut = find_fsdp1(model) is not None  # wrapped by the user: every rank has another shard
        mine += [f"a model {type(model).__name__}", *([] if cut else described(model))]
    for optimizer in bundle.optimizers:
        common = [[one for one in group["params"] if id(one) not in apart] for group in optimizer.param_groups]
        counts = ", ".join(str(len(one)) for one in common)
        mine.append(f"an optimizer {type(optimizer).__name__} with groups of {counts} parameters")
    digests = all_gather_object(sha256("\n".join(mine).encode()).hexdigest(), group=group)
    if len(set(digests)) > 1:
        check_same(all_gather_object(mine, group=group))


def described(model: nn.Module) -> list[str]:
    """Returns one text for each parameter of a model: name, shape, dtype and ``requires_grad``."""
    entries = []
    for name, parameter in named_parameters(model).items():
        use = "trained" if parameter.requires_grad else "frozen"
        entries.append(f"parameter {name} of shape {tuple(parameter.shape)}, {dtype_name(parameter.dtype)}, {use}")
    return entries


def check_same(everybody: Sequence[Sequence[Any]]) -> None:
    """Refuses ranks that prepare different models, because their collectives would hang.

    Args:
        everybody: for every rank, one comparable entry for each parameter and unit.

    Raises:
        PrepareError: the same on every rank, with the first difference.
    """
    first = everybody[0]
    for rank, other in enumerate(everybody):
        if other == first:
            continue
        shorter = min(len(first), len(other))
        at = next((place for place in range(shorter) if first[place] != other[place]), shorter)
        here = [entries[at] if at < len(entries) else "nothing more" for entries in (first, other)]
        raise PrepareError(
            f"ranks prepare different models or optimizers: rank 0 has {here[0]} where rank {rank} has {here[1]}; "
            "every rank must build and prepare the same"
        )
