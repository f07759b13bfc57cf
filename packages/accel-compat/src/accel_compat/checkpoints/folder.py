"""Folders that ``save_state`` of Accelerate wrote, read in full without a model or ranks."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from accel_compat.checkpoints import files, sharded
from accel_compat.checkpoints.closed_shards import read_shards
from accel_compat.checkpoints.files import numbered
from accel_compat.checkpoints.pickles import load
from accel_compat.checkpoints.trusted_pickles import load_trusted
from accel_state.errors import CheckpointError

_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
DDP = "module."
"""Prefix of the names of a model's weights under DDP."""
_NOT_ALLOWED = re.compile(r"\bGLOBAL (\S+)")
_RANDOM = re.compile(rf"{files.RANDOM}_(\d+)\.pkl")
_SHARD_OF_RANK = re.compile(rf"({sharded.MODEL}|{sharded.OPTIMIZER})(_\d+)?_rank\d+\.bin")


@final
@dataclass(slots=True)
class AccelerateFolder:
    """Contents of a folder, as Accelerate saved them.

    Attributes:
        path: the folder.
        layout: ``plain`` (one process, DDP), ``fsdp-full``, ``fsdp-sharded`` or ``deepspeed``.
        models: full weights by name, one mapping for each model.
        is_ordered: whether the weights of each model are in the model's order.
        optimizers: states, by the parameters' numbers or names.
        schedulers: states.
        scaler: state of the loss scaler; None: none was saved.
        random: random states of each rank.
        custom: states of registered objects.
    """

    path: Path
    layout: str
    models: list[dict[str, torch.Tensor]] = field(default_factory=list)
    is_ordered: list[bool] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    scaler: dict[str, Any] | None = None
    random: list[dict[str, Any]] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, *, trust_pickle: bool) -> "AccelerateFolder":
        """Reads a folder.

        Raises:
            CheckpointError: it is none of Accelerate's, is incomplete or damaged, or a file holds more than tensors and
                plain values. With ``trust_pickle`` files of registered objects may hold what can be imported.
        """
        found = cls(path, _layout(path))
        found.random = [_read(path / f"{files.RANDOM}_{rank}.pkl") for rank in range(_ranks(path))]
        _READERS[found.layout](found)
        found.schedulers = [_read(one) for one in _series(path, files.SCHEDULER, "bin")]
        if found.scaler is None and (path / files.SCALER).is_file():
            found.scaler = _read(path / files.SCALER) or None
        reader = load_trusted if trust_pickle else _read_custom
        found.custom = [reader(one) for one in _custom(path)]
        return found

    @property
    def step(self) -> int:
        """Micro-steps that Accelerate counted; 0 where its version did not save them."""
        return int(self.random[0].get("step", 0))

    def add_model(self, weights: Mapping[str, Any], *, is_ordered: bool) -> None:
        """Adds weights under the names of the user's own model."""
        clean = {_WRAPPERS.sub("", name): one for name, one in weights.items()}
        if self.layout == "plain" and len(self.random) > 1 and all(name.startswith(DDP) for name in clean):
            clean = {name.removeprefix(DDP): one for name, one in clean.items()}
        self.models.append(clean)
        self.is_ordered.append(is_ordered)


def _layout(path: Path) -> str:
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; expected one that save_state of Accelerate wrote")
    names = sorted(one.name for one in path.iterdir())
    if "manifest.json" in names:
        raise CheckpointError(f"{path} is a checkpoint of accel already; load_state reads it")
    if parts := [name for name in names if _SHARD_OF_RANK.fullmatch(name)]:
        raise CheckpointError(
            f"{path} has a file of each rank ({parts[0]}), which only as many ranks of Accelerate can read; save it "
            "there with state_dict_type FULL_STATE_DICT or SHARDED_STATE_DICT"
        )
    if (path / files.MODEL).is_dir():
        return "deepspeed"
    if (path / f"{sharded.MODEL}_0").is_dir():
        return "fsdp-sharded"
    if (path / f"{sharded.MODEL}.bin").is_file():
        return "fsdp-full"
    if (path / f"{files.SAFE_MODEL}.safetensors").is_file() or (path / f"{files.MODEL}.bin").is_file():
        return "plain"
    inner = [name for name in names if (path / name).is_dir() and _RANDOM.search("".join(_names(path / name)))]
    hint = f"; nearest: {path / inner[-1]}" if inner else f"; it holds {', '.join(names[:5]) or 'nothing'}"
    raise CheckpointError(
        f"{path} has no weights that save_state of Accelerate wrote (model.safetensors, pytorch_model.bin, "
        f"pytorch_model_fsdp.bin, pytorch_model_fsdp_0, pytorch_model){hint}"
    )


def _names(path: Path) -> list[str]:
    return [one.name for one in path.iterdir()]


def _ranks(path: Path) -> int:
    found = {int(one[1]) for name in _names(path) if (one := _RANDOM.fullmatch(name))}
    if missing := sorted(set(range(max(found, default=0) + 1)) - found):
        raise CheckpointError(f"{path} lacks {files.RANDOM}_{missing[0]}.pkl, the random states of rank {missing[0]}")
    return len(found)


def _series(path: Path, stem: str, ending: str) -> Iterator[Path]:
    """Files ``stem.ending``, ``stem_1.ending`` and so on."""
    index = 0
    while (one := path / numbered(stem, index, ending)).is_file():
        yield one
        index += 1


def _custom(path: Path) -> Iterator[Path]:
    index = 0
    while (one := path / f"{files.CUSTOM}_{index}.pkl").is_file():
        yield one
        index += 1


def _read(path: Path) -> Any:
    try:
        return load(path, map_location="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} lacks {path.name}") from error
    except Exception as error:
        named = _NOT_ALLOWED.search(str(error))
        reason = f"it holds {named[1]}" if named else (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} cannot be read: {reason}") from error


def _read_safe(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _read_custom(path: Path) -> Any:
    try:
        return _read(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; the state of a registered object is more than tensors and plain values. If its source is "
            "trusted, --trust-pickle runs the code in it; what results has to be tensors and plain values"
        ) from error


def _read_plain(found: AccelerateFolder) -> None:
    path, index = found.path, 0
    while True:
        safe, unsafe = (
            path / numbered(files.SAFE_MODEL, index, "safetensors"),
            path / numbered(files.MODEL, index, "bin"),
        )
        if safe.is_file():
            found.add_model(_read_safe(safe), is_ordered=False)
        elif unsafe.is_file():
            found.add_model(_read(unsafe), is_ordered=True)
        else:
            break
        index += 1
    found.optimizers = [_read(one) for one in _series(path, files.OPTIMIZER, "bin")]


def _read_fsdp_full(found: AccelerateFolder) -> None:
    for one in _series(found.path, sharded.MODEL, "bin"):
        found.add_model(_read(one), is_ordered=True)
    found.optimizers = [_clean(_read(one)) for one in _series(found.path, sharded.OPTIMIZER, "bin")]


def _read_fsdp_sharded(found: AccelerateFolder) -> None:
    for stem, key in ((sharded.MODEL, "model"), (sharded.OPTIMIZER, "optimizer")):
        index = 0
        while (folder := found.path / f"{stem}_{index}").is_dir():
            values = read_shards(folder)
            values = values.get(key, values)
            if key == "model":
                found.add_model(values, is_ordered=False)
            else:
                found.optimizers.append(_clean(values))
            index += 1


def _read_deepspeed(found: AccelerateFolder) -> None:
    from accel_deepspeed.checkpoint.zero_folders import read_folder

    index = 0
    while (found.path / (tag := files.MODEL if index == 0 else f"{files.MODEL}_{index}")).is_dir():
        one = read_folder(found.path, tag)
        found.add_model(one.model, is_ordered=False)
        if one.optimizer is not None:
            found.optimizers.append(dict(one.optimizer))
        found.scaler = found.scaler if one.scale is None else dict(one.scale)
        index += 1


_READERS = {
    "plain": _read_plain,
    "fsdp-full": _read_fsdp_full,
    "fsdp-sharded": _read_fsdp_sharded,
    "deepspeed": _read_deepspeed,
}


def _clean(state: Mapping[str, Any]) -> dict[str, Any]:
    """Names of parameters without those of wrappers."""

    def clean(name: Any) -> Any:
        return _WRAPPERS.sub("", name) if isinstance(name, str) else name

    return {
        "state": {clean(name): dict(values) for name, values in state.get("state", {}).items()},
        "param_groups": [{**group, "params": list(map(clean, group["params"]))} for group in state["param_groups"]],
    }
