"""Memory tracker: records storages that operations allocate and free; works on real, fake and meta tensors."""

import weakref
from collections.abc import Iterable
from typing import Any, final

import torch

from accel_planner.private import TorchDispatchMode, packet_of, storage_key


@final
class StorageWatch(TorchDispatchMode):
    """Dispatch mode that records when each storage made by an operation is allocated and freed.

    Storages are counted once, however many tensors view them. Storages of the tensors given beforehand are not counted.

    Attributes:
        events: in order, (key, bytes) for an allocation, (key, -bytes) for a release, and (object, operations so far)
            for each object passed to ``note``.
        live: bytes that are allocated now.
        peak: peak of ``live``.
        flops: floating-point operations, of the operations for which torch has a formula.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), *, count_flops: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[Any, int]] = []
        self.live = 0
        self.peak = 0
        self.flops = 0
        self._known = [tensor.untyped_storage() for tensor in known]  # kept alive, so that their keys are not reused
        self._keys = {storage_key(storage): -1 for storage in self._known}
        self._refs: dict[int, Any] = {}
        self._made = 0
        self._formulas: Any = None
        if count_flops:
            from torch.utils.flop_counter import flop_registry

            self._formulas = flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, then records the storages of its results."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self._see(value)
            elif isinstance(value, list | tuple):
                for item in value:
                    if isinstance(item, torch.Tensor):
                        self._see(item)
        if scratch := _scratch(func, args):
            self._borrow(scratch)
        if self._formulas is not None:
            self._count(func, args, kwargs, result)
        return result

    def key_of(self, tensor: torch.Tensor) -> int:
        """Number of a tensor's storage in order of creation; -1 if it was given beforehand or never seen."""
        return self._keys.get(storage_key(tensor.untyped_storage()), -1)

    def note(self, what: object) -> None:
        """Appends an object to the events."""
        self.events.append((what, self.flops))

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage_key(storage)
        if address in self._keys:
            return
        self._made += 1
        key, size = self._made, storage.nbytes()
        self._keys[address] = key
        self._refs[key] = weakref.ref(storage, lambda _: self._gone(key, address, size))
        self.live += size
        self.peak = max(self.peak, self.live)
        self.events.append((key, size))

    def _borrow(self, size: int) -> None:
        """Records temporary memory that an operation allocated and freed before it returned."""
        self._made += 1
        self.peak = max(self.peak, self.live + size)
        self.events += [(self._made, size), (self._made, -size)]

    def _gone(self, key: int, address: int, size: int) -> None:
        self._keys.pop(address, None)
        self._refs.pop(key, None)
        self.live -= size
        self.events.append((key, -size))

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = packet_of(func)
        if packet in self._formulas:
            self.flops += int(self._formulas[packet](*args, **kwargs, out_val=result))
        elif "_scaled_dot_product_flash_attention_for_cpu" in str(packet):
            self.flops += _attention_flops(args, backward="backward" in str(packet))


def _scratch(func: Any, args: Any) -> int:
    """Temporary bytes of an operation: convolutions copy their inputs into their own memory format.

    oneDNN does so with contiguous images: with the input in the forward, with the input and the output's gradient in
    the backward. Images in ``channels_last`` format are not copied.
    """
    name = str(packet_of(func) or "")
    if name not in ("aten.convolution", "aten.convolution_backward"):
        return 0
    read = args[:2] if name.endswith("backward") else args[:1]
    return sum(tensor.untyped_storage().nbytes() for tensor in read if tensor.is_contiguous())


def _attention_flops(args: Any, *, backward: bool) -> int:
    """FLOPs of attention: two products of (length x keys x size) in the forward, five in the backward."""
    query, key, value = args[1:4] if backward else args[:3]
    batch, heads, length, size = query.shape
    keys, out = key.shape[-2], value.shape[-1]
    scores, mixes = 2 * batch * heads * length * keys * size, 2 * batch * heads * length * keys * out
    return int(3 * scores + 2 * mixes if backward else scores + mixes)
