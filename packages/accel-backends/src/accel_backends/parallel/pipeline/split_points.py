"""Split points: names of the blocks with which the second and later pipeline stages begin."""

from collections.abc import Collection, Sequence

from accel_backends.parallel.pipeline.call_order import CallOrder
from accel_backends.parallel.pipeline.ranges import balanced_ranges
from accel_state.errors import PrepareError, did_you_mean


def balanced_split_points(order: CallOrder, num_stages: int) -> list[str]:
    """Split points between stages whose parameters are about equally large.

    Raises:
        PrepareError: fewer blocks than stages.
    """
    return [order.blocks[one.start].name for one in balanced_ranges(order.block_bytes, num_stages)[1:]]


def stage_ranges(order: CallOrder, points: Sequence[str], num_stages: int) -> list[range]:
    """Blocks of each stage.

    Raises:
        PrepareError: a name is not that of a block after the first, names are not in the order of the blocks, or there
            are more or fewer than ``num_stages - 1``.
    """
    names = [block.name for block in order.blocks]
    for point in points:
        if point not in names[1:]:
            raise PrepareError(
                f"split point {point!r} of {type(order.model).__name__} is not a block behind the first one"
                f"{did_you_mean(str(point), names[1:])}; expected one of {names[1]} to {names[-1]}"
                if len(names) > 1
                else f"split point {point!r}: {type(order.model).__name__} has one block, which cannot be split"
            )
    starts = [names.index(point) for point in points]
    if len(starts) != num_stages - 1 or starts != sorted(set(starts)):
        raise PrepareError(
            f"split_points={list(points)} for {num_stages} pipeline stages; expected {num_stages - 1} different blocks "
            "in the order of the model"
        )
    return [range(*ends) for ends in zip([0, *starts], [*starts, len(names)], strict=True)]


def check_undivided(order: CallOrder, ranges: Sequence[range], classes: Collection[str]) -> None:
    """Refuses classes of modules that pipeline stages divide, or that the model lacks; blocks are never divided.

    Raises:
        PrepareError: names the module.
    """
    model = order.model
    known = {type(module).__name__ for module in model.modules()}
    for name in classes:
        if name not in known:
            raise PrepareError(
                f"no_split_module_classes has {name!r}, and {type(model).__name__} has no module of this class"
                f"{did_you_mean(name, known)}"
            )
        for module in (one for one in model.modules() if type(one).__name__ == name):
            inside = set(module.modules())
            stages = [any(order.blocks[number].module in inside for number in one) for one in ranges]
            if sum(stages) > 1:
                nearest = dict.fromkeys(type(block.module).__name__ for block in order.blocks)
                raise PrepareError(
                    f"no_split_module_classes has {name!r}, which holds the blocks that pipeline stages divide; "
                    f"nearest: {list(nearest)}"
                )
