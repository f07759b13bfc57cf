"""Split points: names of the blocks with which the second and later pipeline stages begin."""

from collections.abc import Collection, Sequence

from accel_backends.parallel.pipeline.causal_lm import CausalLM
from accel_backends.parallel.pipeline.ranges import balanced_ranges
from accel_state.errors import PrepareError, did_you_mean


def block_names(whole: CausalLM) -> list[str]:
    """Names of the blocks of a model, in order, as ``named_modules`` has them."""
    return [f"{whole.base_name}.{whole.blocks_name}.{number}" for number in range(len(whole.blocks))]


def balanced_split_points(whole: CausalLM, num_stages: int) -> list[str]:
    """Split points between stages whose parameters are about equally large.

    Raises:
        PrepareError: fewer blocks than stages.
    """
    names = block_names(whole)
    return [names[one.start] for one in balanced_ranges(whole.block_bytes, num_stages)[1:]]


def split_of(whole: CausalLM, points: Sequence[str], num_stages: int) -> list[int]:
    """Number of blocks of each stage.

    Raises:
        PrepareError: a name is not that of a block after the first, names are not in the order of the blocks, or there
            are more or fewer than ``num_stages - 1``.
    """
    names = block_names(whole)
    for point in points:
        if point not in names[1:]:
            raise PrepareError(
                f"split point {point!r} of {type(whole.model).__name__} is not a block behind the first one"
                f"{did_you_mean(str(point), names[1:])}; expected one of {names[1]} to {names[-1]}"
                if len(names) > 1
                else f"split point {point!r}: {type(whole.model).__name__} has one block, which cannot be split"
            )
    starts = [names.index(point) for point in points]
    if len(starts) != num_stages - 1 or starts != sorted(set(starts)):
        raise PrepareError(
            f"split_points={list(points)} for {num_stages} pipeline stages; expected {num_stages - 1} different blocks "
            "in the order of the model"
        )
    stops = [*starts, len(names)]
    return [stop - start for start, stop in zip([0, *starts], stops, strict=True)]


def check_undivided(whole: CausalLM, classes: Collection[str]) -> None:
    """Refuses classes of modules that pipeline stages divide, or that the model lacks; blocks are never divided.

    Raises:
        PrepareError: names the module.
    """
    model = whole.model
    known = {type(module).__name__ for module in model.modules()}
    divided = {type(module).__name__ for module in (model, whole.base, whole.blocks)}
    for name in classes:
        if name not in known:
            raise PrepareError(
                f"no_split_module_classes has {name!r}, and {type(model).__name__} has no module of this class"
                f"{did_you_mean(name, known)}"
            )
        if name in divided:
            raise PrepareError(
                f"no_split_module_classes has {name!r}, which holds the blocks that pipeline stages divide; nearest: "
                f"[{type(whole.blocks[0]).__name__!r}]"
            )
