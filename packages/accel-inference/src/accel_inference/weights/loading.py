"""Checkpoints read into a model, each weight once, to the device of its module or into the offload folder's index."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_inference.module_tensors.access import is_below, owner_of, place, set_module_tensor_to_device
from accel_inference.module_tensors.devices import check_devices
from accel_inference.module_tensors.dtypes import proper_dtype
from accel_inference.module_tensors.ties import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    device_of,
    find_tied_parameters,
    retie_parameters,
)
from accel_inference.weights.checkpoint_files import PathLike, checkpoint_weights
from accel_inference.weights.kinds import check_kinds
from accel_inference.weights.mapped_files import MappedFiles
from accel_inference.weights.offload_folder import offload_weight, save_offload_index
from accel_inference.weights.reading import read_in_order
from accel_inference.weights.sources import FileWeight, HostWeight, Weight
from accel_state.errors import CheckpointMismatchError

_LOG = getLogger(__name__)
DeviceMap = Mapping[str, int | str | torch.device]


def load_checkpoint_in_model(  # noqa: PLR0913  (the signature that users know)
    model: nn.Module,
    checkpoint: PathLike,
    device_map: DeviceMap | None = None,
    offload_folder: PathLike | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    mapped: bool = False,
) -> None:
    """Reads a checkpoint (see ``checkpoint_files``) into a model, whose parameters may be on the meta device.

    Names and shapes are compared before anything is read; then each weight is read on its own, so that no second copy
    of the model exists at any time (``offload_state_dict`` has nothing to add to that). Weights on "disk" are not read:
    the index of ``offload_folder`` names their places in the checkpoint's safetensors files, or files of the
    folder for what those do not have as it is used.

    After an error in reading, the weights that were replaced are on the meta device: a model without memory is as it
    was, and one with memory does not compute with weights of two checkpoints.

    Weights have ``dtype`` or that of the checkpoint; ``keep_in_fp32_modules`` names modules that stay float32. Names
    that only one side has are logged, or with ``strict`` refused.

    With ``mapped`` the weights on the CPU are pages of the safetensors files (see ``MappedFiles``): nothing is
    read or copied now. The files must stay as they are while the model lives. Files of torch's zip format are mapped
    in any case.

    Raises:
        ValueError: a module has no device in the map, or one that this machine lacks, or is on disk without an offload
            folder.
        CheckpointMismatchError: a weight has another shape, or is quantized in another way than the model's, or the
            model's is quantized by bitsandbytes; with ``strict`` also another set of names.
        CheckpointError: a file is corrupt, cannot be read, or would run code when it is read.
    """
    refuse_sharded(offload_8bit_bnb or broadcast_from_rank0 or not full_state_dict)
    load_weights(
        model,
        checkpoint_weights(checkpoint),
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_buffers=offload_buffers,
        keep_in_fp32_modules=keep_in_fp32_modules,
        strict=strict,
        mapped=mapped,
    )


def refuse_sharded(asked: bool) -> None:
    """Refuses arguments that are served elsewhere, if one of them is given."""
    if asked:
        raise ValueError(
            "offload_8bit_bnb, broadcast_from_rank0 and full_state_dict=False are not served here; to load a model "
            "that is sharded over ranks, use Accelerator.load_model"
        )


def load_weights(  # noqa: PLR0913  (what load_checkpoint_in_model has)
    model: nn.Module,
    sources: Mapping[str, Weight],
    *,
    device_map: DeviceMap | None = None,
    offload_folder: PathLike | None = None,
    dtype: str | torch.dtype | None = None,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    strict: bool = False,
    mapped: bool = False,
    besides: Collection[str] = (),
) -> dict[str, Any]:
    """Does what ``load_checkpoint_in_model`` says with weights by name; the caller loads those in ``besides``.

    Returns the entries of the weights on disk: the index of the folder may have others, or have them no more when
    another process has loaded another checkpoint.
    """
    check_devices(device_map or {})
    ties = find_tied_parameters(model)
    _check_config(model, ties, device_map)
    targets = _targets(model)
    check_kinds(targets, sources)
    _compare(targets, sources, ties, strict=strict, besides=besides)
    plan = _plan(targets, sources, device_map, ties, offload_buffers=offload_buffers)
    del targets  # which would keep the present weights in memory beside the new ones
    if any(step.device == "disk" for step in plan):
        if offload_folder is None:
            raise ValueError(
                "At least one of the model submodule will be offloaded to disk, please pass along an `offload_folder`."
            )
        Path(offload_folder).mkdir(parents=True, exist_ok=True)
    wanted = None if dtype is None else proper_dtype(dtype)
    in_fp32 = keep_in_fp32_modules or ()
    index, dtypes = _write(plan, wanted, in_fp32, offload_folder)
    alike = {name: group for group in ties for name in group}
    for name, its_dtype in dtypes.items():
        for other in alike.get(name, (name,)):
            if other == name or other not in sources:
                empty_weight(model, other, its_dtype)
    placed = sorted((step for step in plan if step.device != "disk"), key=_place_in_files)
    files = MappedFiles() if mapped else None
    given: set[Hashable] = set()

    def weight_of(step: _Step) -> Weight:
        weight = _in_wanted_dtype(step, wanted, in_fp32)
        if isinstance(weight, HostWeight):
            # Two names of one tensor, as a file of torch's has of a tied model, are two tensors unless they are tied.
            if weight.key in given:
                return HostWeight(weight.tensor.clone())
            given.add(weight.key)
        return files.weight(weight) if files is not None and str(step.device) == "cpu" else weight

    with emptied_after_an_error(model, [step.name for step in placed]):
        for step, value in zip(placed, read_in_order(map(weight_of, placed)), strict=True):
            set_module_tensor_to_device(model, step.name, step.device, value=value, dtype=value.dtype)
    # The value that was loaded is that of all names, and not what another of them had before.
    retie_parameters(model, [sorted(group, key=lambda name: name not in sources) for group in ties])
    return index


def _write(
    plan: Sequence["_Step"], wanted: torch.dtype | None, in_fp32: Sequence[str], folder: PathLike | None
) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
    """Writes what is on disk, before the model is touched, and its index; returns entries and dtypes by name."""
    index: dict[str, Any] = {}
    dtypes: dict[str, torch.dtype] = {}
    for step in plan:
        if step.device == "disk":
            assert folder is not None
            weight = _in_wanted_dtype(step, wanted, in_fp32)
            _offload(step.name, weight, folder, index)
            dtypes[step.name] = weight.dtype
    if folder is not None:
        save_offload_index(index, folder)
    return index, dtypes


@contextmanager
def emptied_after_an_error(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """After an error inside, the weights that were replaced there have no memory: nothing is half-loaded.

    Those that had none before are the same objects again, so that ties remain. Values that others replace are not kept,
    because they would be a second copy of the model.
    """
    before = {name: _tensor(model, name) for name in names}
    empty = {name: tensor for name, tensor in before.items() if tensor.is_meta}
    identities = {name: id(tensor) for name, tensor in before.items()}
    del before
    try:
        yield
    except BaseException:
        for name, identity in identities.items():
            if name in empty:
                owner, leaf = owner_of(model, name)
                (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf] = empty[name]  # type: ignore[assignment]
            elif id(tensor := _tensor(model, name)) != identity:
                empty_weight(model, name, tensor.dtype)
        raise


def _tensor(model: nn.Module, name: str) -> Tensor:
    owner, leaf = owner_of(model, name)
    found = owner._parameters.get(leaf) if leaf in owner._parameters else owner._buffers[leaf]
    assert found is not None
    return found


def empty_weight(model: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Puts a weight of a model on the meta device, in a dtype."""
    owner, leaf = owner_of(model, name)
    place(owner, leaf, torch.empty(_tensor(model, name).shape, dtype=dtype, device="meta"))


@dataclass(frozen=True, slots=True)
class _Step:
    """One weight, and where it goes."""

    name: str
    source: Weight
    device: int | str | torch.device


def _place_in_files(step: _Step) -> tuple[str, int]:
    """Sorts the weights of files by their place there, because disks read fastest in that order."""
    source = step.source
    return (str(source.file.path), source.offset) if isinstance(source, FileWeight) else ("", 0)


def _targets(model: nn.Module) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def _check_config(model: nn.Module, ties: Sequence[Sequence[str]], device_map: DeviceMap | None) -> None:
    if check_tied_parameters_in_config(model) and not ties:
        _LOG.warning("The model weights are not tied; call model.tie_weights() before loading the checkpoint")
    if device_map is not None:
        check_tied_parameters_on_same_device(ties, device_map)


def _compare(
    targets: Mapping[str, Tensor],
    sources: Mapping[str, Weight],
    ties: Sequence[Sequence[str]],
    *,
    strict: bool,
    besides: Collection[str],
) -> None:
    unknown = sorted(set(sources) - set(targets))
    served = {*besides, *(name for group in ties if any(member in sources for member in group) for name in group)}
    missing = [
        name
        for name, tensor in targets.items()
        if name not in sources and name not in served and (tensor.is_meta or isinstance(tensor, nn.Parameter))
    ]
    if unknown or missing:
        texts = [f"the model lacks, and they were not used when it was loaded: {_some(unknown)}"] if unknown else []
        texts += [f"the checkpoint lacks, and they stay as they are: {_some(missing)}"] if missing else []
        text = "weights that " + "; weights that ".join(texts)
        if strict:
            raise CheckpointMismatchError(f"{text} (strict=False accepts this)")
        _LOG.warning("%s", text)
    wrong = [
        f"{name} is {list(source.shape)} in the checkpoint and {list(targets[name].shape)} in the model"
        for name, source in sources.items()
        if name in targets and source.shape != tuple(targets[name].shape)
    ]
    if wrong:
        raise CheckpointMismatchError(f"shapes do not match, nothing was loaded: {_some(wrong, '; ')}")


def _some(names: Sequence[str], separator: str = ", ") -> str:
    rest = f"{separator}and {len(names) - 8} more" if len(names) > 8 else ""
    return separator.join(names[:8]) + rest


def _plan(
    targets: Mapping[str, Tensor],
    sources: Mapping[str, Weight],
    device_map: DeviceMap | None,
    ties: Sequence[Sequence[str]],
    *,
    offload_buffers: bool,
) -> list[_Step]:
    """A step for each weight of the checkpoint, and for those that ``_tied_sources`` adds."""
    steps = []
    shared = {
        id(targets[name]): name for name in targets if device_map is None or device_of(name, device_map) is not None
    }
    for name, source in {**sources, **_tied_sources(sources, device_map or {}, ties)}.items():
        if name not in targets:
            continue
        target = targets[name]
        device: Any = device_of(name, device_map) if device_map is not None else target.device
        if device is None and device_map is not None:  # its module is shared, and mapped under another name
            device = device_of(shared.get(id(target), name), device_map)
        if device is None:
            raise ValueError(f"{name} doesn't have any device set.")
        if device_map is None and target.is_meta:
            device = "cpu"
        if device == "disk" and not isinstance(target, nn.Parameter) and not offload_buffers:
            device = "cpu"
        steps.append(_Step(name, source, device))
    return steps


def _tied_sources(
    sources: Mapping[str, Weight], device_map: DeviceMap, ties: Sequence[Sequence[str]]
) -> dict[str, Weight]:
    """Sources of tied names that the checkpoint lacks and the map places off the disk, where those that it has are."""
    found: dict[str, Weight] = {}
    for group in ties:
        present = [name for name in group if name in sources]
        if present and all(device_of(name, device_map) == "disk" for name in present):
            resident = (name for name in group if device_of(name, device_map) not in ("disk", None))
            found.update(dict.fromkeys(resident, sources[present[0]]))
    return found


def _in_wanted_dtype(step: _Step, wanted: torch.dtype | None, in_fp32: Sequence[str]) -> Weight:
    """The weight in the dtype asked for, or that of the checkpoint; integers keep theirs."""
    own = step.source.dtype
    if not own.is_floating_point:
        return step.source
    dtype = wanted or own
    if dtype.itemsize < 4 and is_below(step.name, in_fp32):
        dtype = torch.float32
    return step.source.in_dtype(dtype)


def _offload(name: str, source: Weight, folder: PathLike, index: dict[str, Any]) -> None:
    if isinstance(source, FileWeight) and source.dtype == source.stored:
        index[name] = {
            "safetensors_file": str(source.file.path),
            "weight_name": source.name,
            "dtype": str(source.dtype).removeprefix("torch."),
        }
    else:
        offload_weight(source.read(), name, folder, index)


def missing_weights(model: nn.Module, offloaded: Mapping[str, Any]) -> list[str]:
    """Names of tensors that are on the meta device and not among the offloaded ones, nor tied to one of those."""
    ties = find_tied_parameters(model)
    served = {*offloaded, *(name for group in ties if any(member in offloaded for member in group) for name in group)}
    return [name for name, tensor in _targets(model).items() if tensor.is_meta and name not in served]
