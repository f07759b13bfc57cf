"""Random number generators: seeding, states without pickle, derived seeds, synchronization over ranks.

The global generators are Python's ``random``, numpy's legacy generator (if numpy is imported), torch's CPU generator
and the generators of the accelerator. A saved state is a dict of tensors, numbers and strings only.
"""

import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_state.collectives.group_argument import resolve
from accel_state.collectives.objects import broadcast_object_list
from accel_state.determinism import Determinism as Determinism
from accel_state.determinism import set_deterministic as set_deterministic
from accel_state.device.kinds import DEVICE_KINDS
from accel_state.errors import CheckpointMismatchError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_state.device.device import Device

_MERSENNE_WORDS = 625  # 624 words of state and the position, as in random.getstate
_NUMPY_WORDS = 624
PYTHON, NUMPY, TORCH, DEVICE = "python", "numpy", "torch", "device"


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> Determinism:
    """Seeds Python, numpy, torch and all accelerators.

    With ``device_specific`` each process adds its rank (of the open session, otherwise from the launcher's variables),
    so that ranks draw different numbers. With ``deterministic`` torch also computes deterministically, or raises where
    it cannot (see ``set_deterministic``).

    Returns torch's previous switches: ``set_seed(...).restore()`` undoes ``deterministic``.
    """
    before = set_deterministic() if deterministic else Determinism.current()
    common = seed
    if device_specific:
        from accel_state.session import current_topology

        seed += current_topology().rank
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)  # numpy accepts 32 bits
    torch.manual_seed(seed)  # seeds every accelerator too, now or at its first use
    for kind in DEVICE_KINDS.values():
        kind.functions.seed(common)  # SPMD: all devices draw from one generator, so no rank is added
    return before


def derive_seed(seed: int, *keys: int | str) -> int:
    """Derives a seed in ``[0, 2**63)`` from ``seed`` and all ``keys``, the same on every machine and forever.

    For independent random streams: of ranks that did not exist when a checkpoint was written, workers, epochs, samples.
    The seed is the first 8 bytes, big-endian and without the top bit, of the SHA-256 of the UTF-8 text of the JSON
    array ``[seed,key,...]`` written without spaces and in ASCII.

    Raises:
        TypeError: a key is neither an integer nor a string.
    """
    for key in (seed, *keys):
        if isinstance(key, bool) or not isinstance(key, (int, str)):
            raise TypeError(f"derive_seed takes integers and strings, but got {key!r} ({type(key).__name__})")
    text = json.dumps([seed, *keys], separators=(",", ":"), ensure_ascii=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") & (2**63 - 1)


def rng_state() -> dict[str, Any]:
    """Returns the state of every global generator in use: nested dicts and lists of CPU tensors, numbers and strings.

    Keys: ``python``, ``torch``, ``numpy`` (if imported) and ``device`` (the accelerator of this process, if any: its
    type, one state per visible device and the index of the current device).
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        PYTHON: {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss},
        TORCH: torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        state[NUMPY] = _numpy_state()
    devices = _devices()
    if devices:
        states = [device.rng_state().clone() for device in devices]
        state[DEVICE] = {"type": devices[0].type, "current": _current(devices), "states": states}
    return state


def set_rng_state(state: Mapping[str, Any], *, strict: bool = True) -> list[str]:
    """Restores a result of ``rng_state`` completely, or raises before any generator is changed.

    The current device gets the state of the device that was current then, whose index gets that of the current one;
    other devices get theirs by index, and none if the number of visible devices has changed. Without ``strict``,
    generators without a saved state and states without a generator are skipped.

    Returns the names of the skipped parts; empty with ``strict``.

    Raises:
        CheckpointMismatchError: a part is missing or has no generator here (``strict``), or is malformed (always).
    """
    devices = _devices()
    here = {PYTHON, TORCH} | ({NUMPY} if "numpy" in sys.modules else set()) | ({DEVICE} if devices else set())
    problems = {name: "is missing from the saved state" for name in here - state.keys()}
    problems |= {name: "was saved, but this process has no such generator" for name in state.keys() - here}
    if devices and DEVICE in state and state[DEVICE]["type"] != devices[0].type:
        problems[DEVICE] = f"was saved on {state[DEVICE]['type']}, but this process computes on {devices[0].type}"
    if problems and strict:
        told = "; ".join(f"{name!r} {problem}" for name, problem in sorted(problems.items()))
        raise CheckpointMismatchError(f"cannot restore the random number generators: {told}")
    usable = {name: state[name] for name in sorted(here & state.keys()) if name not in problems}
    _check(usable)
    if PYTHON in usable:
        part = usable[PYTHON]
        random.setstate((part["version"], tuple(part["words"].tolist()), part["gauss"]))
    if TORCH in usable:
        torch.set_rng_state(usable[TORCH].cpu())
    if NUMPY in usable:
        _set_numpy_state(usable[NUMPY])
    if DEVICE in usable:
        _set_device_states(usable[DEVICE], devices)
    return sorted(problems)


def _check(parts: Mapping[str, Any]) -> None:
    """Raises, before any generator is changed, if a part does not have the form that ``rng_state`` writes."""
    wanted: dict[str, Callable[[Any], bool]] = {
        PYTHON: lambda part: (
            part["words"].numel() == _MERSENNE_WORDS and part["version"] == random.getstate()[0] and "gauss" in part
        ),
        NUMPY: lambda part: part["key"].numel() == _NUMPY_WORDS and {"pos", "has_gauss", "gauss"} <= part.keys(),
        TORCH: lambda part: part.dtype == torch.uint8 and part.numel() == torch.get_rng_state().numel(),
        DEVICE: lambda part: 0 <= part["current"] < len(part["states"]),
    }
    for name, part in parts.items():
        try:
            fits = wanted[name](part)
        except (KeyError, TypeError, AttributeError):
            fits = False
        if not fits:
            raise CheckpointMismatchError(f"cannot restore the random number generators: {name!r} is malformed")


def _numpy_state() -> dict[str, Any]:
    found = sys.modules["numpy"].random.get_state(legacy=False)
    if found["bit_generator"] != "MT19937":
        raise CheckpointMismatchError(
            f"numpy's global generator is {found['bit_generator']}, which cannot be saved; expected MT19937"
        )
    return {
        "key": torch.tensor([int(word) for word in found["state"]["key"]], dtype=torch.int64, device="cpu"),
        "pos": int(found["state"]["pos"]),
        "has_gauss": int(found["has_gauss"]),
        "gauss": float(found["gauss"]),
    }


def _set_numpy_state(part: Mapping[str, Any]) -> None:
    key = sys.modules["numpy"].array(part["key"].tolist(), dtype="uint32")
    sys.modules["numpy"].random.set_state(("MT19937", key, part["pos"], part["has_gauss"], part["gauss"]))


def _devices() -> "list[Device]":
    """Returns all visible devices of this process's device type; none on a CPU, or if no accelerator is initialised."""
    from accel_state.device.device import Device, count_devices
    from accel_state.session import Session

    session = Session.current()
    if session is not None:
        chosen = session.device.type
    else:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        chosen = "cpu" if accelerator is None else accelerator.type
        module = torch.get_device_module(chosen)
        if chosen != "cpu" and not getattr(module, "is_initialized", lambda: True)():
            return []
    if chosen == "cpu":
        return []
    if not Device(chosen).kind.functions.indexed:
        return [Device(chosen, None)]
    return [Device(chosen, index) for index in range(count_devices(chosen))]


def _current(devices: "list[Device]") -> int:
    return 0 if len(devices) == 1 else int(torch.accelerator.current_device_index())


def _set_device_states(part: Mapping[str, Any], devices: "list[Device]") -> None:
    states, now, then = list(part["states"]), _current(devices), part["current"]
    if len(states) != len(devices):
        devices[now].set_rng_state(states[then])
        return
    states[now], states[then] = states[then], states[now]
    for device, state in zip(devices, states, strict=True):
        device.set_rng_state(state)


def synchronize_rng_state(
    rng_type: object = None,
    generator: torch.Generator | None = None,
    *,
    group: "ProcessGroup | None" = None,
) -> None:
    """Broadcasts rank 0's state of one generator to all ranks; does nothing without a group.

    Collective: every rank of the group must call this. ``rng_type`` is "torch", "python", "numpy", "generator" (the
    argument ``generator``) or a device type (the current device), as text or as an enum member with that value. The
    default is ``generator`` if it is given, otherwise torch's CPU generator.

    Raises:
        ValueError: an unknown type, "generator" without a generator, or a device or library that this process lacks.
    """
    kind = str(getattr(rng_type, "value", rng_type) or ("torch" if generator is None else "generator"))
    mine = _get(kind, generator)
    world = resolve(group)
    if world is None:
        return
    box = [mine]
    broadcast_object_list(box, 0, group=world)
    _set(kind, generator, box[0])


def synchronize_rng_states(
    rng_types: Iterable[object],
    generator: torch.Generator | None = None,
    *,
    group: "ProcessGroup | None" = None,
) -> None:
    """Calls ``synchronize_rng_state`` for each of ``rng_types``.

    Collective: every rank of the group must call this.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator, group=group)


def _get(kind: str, generator: torch.Generator | None) -> Any:
    if kind == "generator":
        if generator is None:
            raise ValueError("to synchronize a 'generator', give that torch.Generator; got None")
        return generator.get_state()
    if kind == "torch":
        return torch.get_rng_state()
    if kind == PYTHON:
        return random.getstate()
    if kind == NUMPY:
        if "numpy" not in sys.modules:
            raise ValueError("cannot synchronize the generator of 'numpy', which is not imported")
        return _numpy_state()
    return _device(kind).rng_state()


def _set(kind: str, generator: torch.Generator | None, state: Any) -> None:
    if generator is not None and kind == "generator":
        generator.set_state(state)
    elif kind == "torch":
        torch.set_rng_state(state)
    elif kind == PYTHON:
        random.setstate(state)
    elif kind == NUMPY:
        _set_numpy_state(state)
    else:
        _device(kind).set_rng_state(state)


def _device(kind: str) -> "Device":
    from accel_state.device.device import Device, count_devices

    if kind not in DEVICE_KINDS:
        known = ", ".join(["torch", PYTHON, NUMPY, "generator", *DEVICE_KINDS])
        raise ValueError(f"unknown random number generator {kind!r}; known: {known}")
    if kind != "cpu" and count_devices(kind) == 0:
        raise ValueError(f"cannot synchronize the generator of {kind!r}: this process sees no such device")
    return Device(kind, None)
