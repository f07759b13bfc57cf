"""Blocks of a model: the modules of which it consists, found by declaration, repetition or class."""

from collections.abc import Sequence

from torch import nn

from accel_state.errors import PrepareError, did_you_mean


def declared_or_repeated_blocks(model: nn.Module) -> list[str]:
    """Returns the names of the blocks that the model declares (``_no_split_modules``), or of those that it repeats."""
    declared = getattr(model, "_no_split_modules", None)
    found = blocks_by_class(model, list(declared), strict=False) if declared else []
    return found or repeated_blocks(model)


def repeated_blocks(model: nn.Module) -> list[str]:
    """Returns the names of repeated blocks: elements of an outermost list of two or more modules of one class.

    Classes are compared by name, because some blocks of a prepared model may have a subclass of the same name.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}.") for block in found) or not isinstance(
            module, (nn.ModuleList, nn.Sequential)
        ):
            continue
        kinds = {(type(child).__module__, type(child).__qualname__) for child in module}
        if len(module) > 1 and len(kinds) == 1 and any(True for _ in next(iter(module)).children()):
            found.extend(f"{name}.{position}" if name else str(position) for position in range(len(module)))
    return found


def blocks_by_class(model: nn.Module, names: Sequence[str], *, strict: bool = True) -> list[str]:
    """Returns the names of the modules whose class name is one of ``names``.

    Raises:
        PrepareError: with ``strict``, no module has one of the classes.
    """
    found = {name: type(module).__name__ for name, module in model.named_modules()}
    known = list(dict.fromkeys(found.values()))
    missing = [name for name in names if name not in known]
    if missing and strict:
        hint = did_you_mean(missing[0], known)
        raise PrepareError(
            f"Could not find the transformer layer class {missing[0]} in the model. {type(model).__name__} consists of "
            f"{', '.join(known)}{hint}"
        )
    return [name for name, kind in found.items() if kind in names]
