"""Automatic device maps: modules in their order, each on the first device that has room for it."""

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import final
from warnings import warn

import torch
from torch import Tensor, nn

from accel_inference.module_tensors.ties import check_tied_parameters_in_config, find_tied_parameters
from accel_inference.placement.budgets import HOST_DEVICES, Budgets, DeviceName, get_max_memory
from accel_inference.placement.device_map import clean_device_map
from accel_inference.placement.sizes import (
    Part,
    SpecialDtypes,
    compute_module_sizes,
    direct_parts,
    get_max_layer_size,
    is_divisible,
    layers,
    unsplittable_classes,
)
from accel_state.enums import CustomDtype
from accel_state.errors import did_you_mean
from accel_state.sizes import readable_bytes

_LOG = getLogger(__name__)


def infer_auto_device_map(  # noqa: PLR0913  (the signature that users know)
    model: nn.Module,
    max_memory: Mapping[DeviceName, int | str] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: str | torch.dtype | CustomDtype | None = None,
    special_dtypes: SpecialDtypes | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
    *,
    activations: Mapping[str, int] | None = None,
) -> "OrderedDict[str, DeviceName]":
    """Places the modules of a model on accelerators, the host and the disk, in this order; the model may be meta.

    A module that has no room on the device in turn is divided into its children, or, if it is a leaf or of a class of
    ``no_split_module_classes``, goes to the next device; devices are never returned to. The first accelerator and the
    host keep room for the largest layer, which is loaded there when a module of the host or the disk computes. Tied
    parameters go to one device. A tensor takes the bytes that ``compute_module_sizes`` says for ``dtype`` and
    ``special_dtypes``; the disk takes any number.

    ``activations``: for each module by name, the bytes beside weights that are live while it computes, as
    ``accel_planner.forward_memory`` finds them with a sample of the inputs. Each device that computes then keeps room
    for the largest of its modules; that of offloaded modules is on the first accelerator of the map. Without them
    budgets are for weights only. A module has the largest of the entries at and inside it, or else that of the nearest
    one above.

    ``fallback_allocation``: a device that would stay empty takes the first later module that it has room for.
    ``clean_result=False`` keeps an entry for each placed module. A warning says when buffers of offloaded modules,
    which stay on an accelerator unless ``offload_buffers``, have room on none.

    Raises:
        ValueError: ``activations`` names a module that the model does not have, or has negative bytes.
    """
    _check_activations(model, activations or {})
    budgets = get_max_memory(max_memory)
    budgets.setdefault("disk", 0)
    if check_tied_parameters_in_config(model) and not find_tied_parameters(model):
        _LOG.warning("The model weights are not tied; call model.tie_weights() before inferring a device map")
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    buffer_sizes = compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)
    while True:
        placement = _Placement(
            budgets=budgets,
            sizes=sizes,
            buffer_sizes=buffer_sizes,
            ties=find_tied_parameters(model),
            unsplittable=unsplittable_classes(no_split_module_classes),
            fallback=fallback_allocation,
            queue=direct_parts("", model),
            activations=_Activations(activations or {}),
        )
        placement.run()
        unused = placement.unused_first() if activations else None
        if unused is None:
            break
        # What is offloaded computes on the first accelerator of the map, which then has to keep the room.
        budgets = {device: size for device, size in budgets.items() if device != unused}
    placement.report(verbose=verbose, offload_buffers=offload_buffers)
    found: OrderedDict[str, DeviceName] = OrderedDict(placement.device_map)
    return OrderedDict(clean_device_map(found)) if clean_result else found


@final
class _Activations:
    """Bytes of activations by module: the largest at and inside it, or else that of the nearest one above."""

    def __init__(self, given: Mapping[str, int]) -> None:
        self._given = given
        self._inside: dict[str, int] = {}
        for name, size in given.items():
            for above in _with_ancestors(name):
                self._inside[above] = max(size, self._inside.get(above, 0))

    def of(self, name: str) -> int:
        """Bytes of one module or tensor."""
        if name in self._inside:
            return self._inside[name]
        return next((self._given[above] for above in _with_ancestors(name) if above in self._given), 0)

    def largest(self, names: Iterable[str]) -> int:
        """The most bytes of any of these; 0 if there are none."""
        return max(map(self.of, names), default=0) if self._given else 0


def _with_ancestors(name: str) -> Iterator[str]:
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


@dataclass(slots=True)
class _Placement:
    """State of one search: what is placed, what is left, and the device in turn."""

    budgets: Budgets
    sizes: Mapping[str, int]
    buffer_sizes: Mapping[str, int]
    ties: list[list[str]]
    unsplittable: tuple[str, ...]
    fallback: bool
    queue: list[Part]
    activations: _Activations
    turn: int = 0
    device_map: dict[str, DeviceName] = field(default_factory=dict)
    placed: list[Part] = field(default_factory=list)
    used: dict[DeviceName, int] = field(default_factory=lambda: defaultdict(int))
    computing: dict[DeviceName, int] = field(default_factory=lambda: defaultdict(int))
    """For each device: the largest activations of what is placed on it."""
    too_small: dict[DeviceName, int] = field(default_factory=dict)
    """For each accelerator that took nothing: the bytes that the smallest module lacked."""

    @property
    def devices(self) -> list[DeviceName]:
        return list(self.budgets)

    @property
    def accelerators(self) -> list[DeviceName]:
        return [device for device in self.devices if device not in HOST_DEVICES]

    def run(self) -> None:
        while self.queue:
            self._place_next(*self.queue[0])

    def _place_next(self, name: str, module: nn.Module | Tensor) -> None:
        device = self.devices[self.turn]
        tied = self._tied_with(name)
        together_names = {name, *(other for other, _ in tied)}
        others = [part for part in self.queue if part[0] not in together_names]
        room = self._room(device, others, placing=together_names)
        alone = self.sizes[name]
        together = alone + sum(self.sizes[other] - self._tied_bytes(name, other) for other, _ in tied)
        if room is None or together <= room:
            self._take([(name, module), *tied], together, device)
        elif tied and alone <= room and self._divide_first([part for part in tied if part[0] != name]):
            return
        elif alone > room and is_divisible(module, self.unsplittable):
            self._divide(name, module)
        elif not self._fall_back(device):
            if device in self.accelerators and not self.used[device]:
                self.too_small[device] = alone - room
            self.turn += 1

    def _take(self, parts: Sequence[Part], size: int, device: DeviceName) -> None:
        names = [name for name, _ in parts]
        self.queue = [part for part in self.queue if part[0] not in names]
        self.placed += parts
        self.used[device] += size
        self.computing[device] = max(self.computing[device], self.activations.largest(names))
        self.device_map.update(dict.fromkeys(names, device))

    def _room(self, device: DeviceName, others: Sequence[Part], *, placing: Collection[str] = ()) -> int | None:
        """Free bytes of a device, None for any number; where layers are loaded, the largest of ``others`` has room.

        So have the activations of the modules that compute there, with those of the parts that are being placed.
        """
        if device == "disk":
            return None
        reserved = self._working_memory(device, others, placing)
        if device in self._loading_devices():
            reserved += get_max_layer_size(others, self.sizes, self.unsplittable)[0]
        return self.budgets[device] - reserved - self.used[device]

    def _working_memory(self, device: DeviceName, others: Sequence[Part], placing: Collection[str]) -> int:
        """Bytes of activations of the module that needs the most of those that compute on a device.

        The first device computes what is offloaded, too, which may be each of ``others``.
        """
        if device == "cpu" and self.accelerators:
            return 0
        needed = max(self.computing[device], self.activations.largest(placing))
        if device == self.devices[0]:
            waiting = self.activations.largest(name for name, _ in layers(others, self.unsplittable))
            needed = max(needed, waiting, *(self.computing[place] for place in HOST_DEVICES))
        return needed

    def unused_first(self) -> DeviceName | None:
        """The first accelerator if it took nothing, though a later one did and something is offloaded."""
        took = [device for device in self.accelerators if device in self.device_map.values()]
        offloaded = any(where in HOST_DEVICES for where in self.device_map.values())
        first = next(iter(self.accelerators), None)
        return first if offloaded and took and first not in took else None

    def _loading_devices(self) -> tuple[DeviceName, ...]:
        if "mps" in self.budgets:
            return ("mps",)
        return (*self.accelerators[:1], "cpu")

    def _tied_with(self, name: str) -> list[Part]:
        """Parts of the queue that go with ``name``, because they hold a parameter that it or another of them holds."""
        found: set[str] = {name}
        reached: set[int] = set()
        while True:
            groups = {
                number
                for number, group in enumerate(self.ties)
                if any(_holds(part, member) for part in found for member in group)
            }
            if groups == reached:
                return [part for part in self.queue if part[0] in found and part[0] != name]
            reached = groups
            members = [member for number in groups for member in self.ties[number]]
            found |= {part for part, _ in self.queue if any(_holds(part, member) for member in members)}

    def _tied_bytes(self, name: str, other: str) -> int:
        """Bytes of ``other`` that are tied to parameters of ``name``: they are held once."""
        groups = [group for group in self.ties if any(_holds(name, member) for member in group)]
        inside = [[self.sizes[member] for member in group if _holds(other, member)] for group in groups]
        return sum(max(sizes) for sizes in inside if sizes)

    def _divide(self, name: str, module: nn.Module | Tensor) -> None:
        place = next(index for index, part in enumerate(self.queue) if part[0] == name)
        self.queue[place : place + 1] = direct_parts(name, module)

    def _divide_first(self, parts: Sequence[Part]) -> bool:
        """Divides the first of the parts that can be; returns whether one was."""
        for name, module in parts:
            if is_divisible(module, self.unsplittable):
                self._divide(name, module)
                return True
        return False

    def _fall_back(self, device: DeviceName) -> bool:
        """Moves the first module that an empty device has room for to the front of the queue, breadth first."""
        room = self._room(device, self.queue)
        if not self.fallback or self.used[device] or room is None:
            return False
        kept = self._working_memory(device, self.queue, ())
        level: list[tuple[Part, list[Part]]] = [(part, [part]) for part in self.queue]
        while level:
            for (name, module), path in level:
                needed = self.sizes[name] + max(0, self.activations.of(name) - kept)
                fits = self.sizes[name] > 0 and needed <= room
                if fits and not isinstance(module, Tensor) and self._fits_with_ties(name, room):
                    self._isolate(path)
                    return True
            level = [
                (part, [*path, part])
                for (name, module), path in level
                if is_divisible(module, self.unsplittable)
                for part in direct_parts(name, module)
            ]
        return False

    def _fits_with_ties(self, name: str, room: int) -> bool:
        """Whether no parameter of ``name`` is tied to one outside, or all of the group has room."""
        tied = [
            group
            for group in self.ties
            if any(_holds(name, member) for member in group) and not all(_holds(name, member) for member in group)
        ]
        return not tied

    def _isolate(self, path: Sequence[Part]) -> None:
        """Divides the modules on the path to its last part, and moves that part to the front."""
        for name, module in path[:-1]:
            self._divide(name, module)
        target = path[-1]
        self.queue = [target, *(part for part in self.queue if part[0] != target[0])]

    def report(self, *, verbose: bool, offload_buffers: bool) -> None:
        """Logs what did not fit, and warns of buffers without room."""
        if verbose:
            for name, device in self.device_map.items():
                _LOG.info("%s on %s: %s", name, device, readable_bytes(self.sizes[name]))
        if self.too_small and not any(self.used[device] for device in self.accelerators):
            lacking = ", ".join(f"{device} lacks {readable_bytes(size)}" for device, size in self.too_small.items())
            _LOG.info("insufficient memory on every accelerator for a module and the largest layer: %s", lacking)
        if not offload_buffers:
            self._warn_of_buffers()

    def _warn_of_buffers(self) -> None:
        parts = [part for part in self.placed if self.device_map[part[0]] in HOST_DEVICES]
        offloaded = sum(self.buffer_sizes.get(name, 0) for name, _ in parts)
        rooms = [self._room(device, parts) or 0 for device in self.accelerators]
        if rooms and offloaded and max(rooms) < offloaded:
            warn(
                f"Current model requires {offloaded} bytes of buffer for offloaded layers, which seems does not fit "
                "any accelerator's remaining memory. Pass offload_buffers=True to offload them as well.",
                stacklevel=5,
            )


def _check_activations(model: nn.Module, activations: Mapping[str, int]) -> None:
    names = {name for name, _ in model.named_modules()}
    for name, size in activations.items():
        if name not in names:
            hint = did_you_mean(name, names)
            raise ValueError(f"activations names {name!r}, which {type(model).__name__} does not have{hint}")
        if size < 0:
            raise ValueError(f"activations of {name!r} are {size} bytes; expected a number from 0")


def _holds(module: str, parameter: str) -> bool:
    """Whether a parameter is that of this name, or below it."""
    return not module or f"{parameter}.".startswith(f"{module}.")
