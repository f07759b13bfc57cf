"""Launchers for an interpreter (notebook cell, console, test): run a function in several processes."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_launch.config import AccelConfig, resolve_config
from accel_launch.config.model import DOCUMENT_VARIABLE
from accel_launch.config.resolve import without_launcher
from accel_launch.config.setting import nearest
from accel_launch.launch.host import count_accelerators
from accel_launch.notebook.cell import run_in_cell
from accel_launch.notebook.environment import has_tpu, place_of, processes_for
from accel_launch.notebook.serialized_call import pack_call, unpack_results
from accel_state.errors import ConfigError, LaunchError

_RENDEZVOUS = ("static", "c10d", "etcd", "etcd-v2")
_ANY_PORT = "29500"
_WORKER = "accel_launch.notebook.child_main"


def notebook_launcher(  # noqa: PLR0913  (the signature that users know)
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = _ANY_PORT,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> list[Any]:
    """Calls ``function(*args)`` in ``num_processes`` processes of this machine and returns their results, by rank.

    The processes are new, so the earlier use of this interpreter, for example of an accelerator, does not matter. They
    share no state with it: the function and all that it refers to are serialized. Their output appears in the cell. An
    interrupt ends all of them. With one process, the function is called in this process.

    Args:
        function: defined in a cell, or importable; makes its own ``Accelerator``.
        args: its arguments.
        num_processes: number on this machine; None: one per accelerator, or one on a machine without any. Always one on
            a TPU, where it drives all cores, and on Colab with fewer than two GPUs.
        mixed_precision: default precision of an ``Accelerator`` in the function.
        use_port: port of the rendezvous; on one machine a free port is used unless it differs from the default.
        master_addr: address of node 0.
        node_rank: index of this node among ``num_nodes``; the same cell runs on each.
        num_nodes: nodes of this job.
        rdzv_backend: accepted as in torchrun, without effect: there is one rendezvous.
        rdzv_endpoint: ``address:port`` instead of ``master_addr`` and ``use_port``.
        rdzv_conf: ``timeout`` or ``join_timeout``, seconds to wait for the other nodes.
        rdzv_id: accepted as in torchrun, without effect: nodes that meet at one address belong to one job.
        max_restarts: number of restarts of all processes after one has failed.
        monitor_interval: seconds between two checks of the processes.
        log_line_prefix_template: written before each line, with ``${rank}``, ``${local_rank}`` and ``${role_name}``.

    Raises:
        ConfigError: an argument that cannot work, such as an unknown precision, or ``args`` that are not a sequence.
        LaunchError: a process failed, with the traceback of the first; or the function cannot be serialized.
    """
    __tracebackhide__ = True  # makes IPython show the cell without these lines above the error
    if rdzv_backend not in _RENDEZVOUS:
        raise ConfigError(
            f"rdzv_backend is {rdzv_backend!r}; expected one of {', '.join(_RENDEZVOUS)}"
            f"{_did_you_mean(rdzv_backend, _RENDEZVOUS)}"
        )
    if num_nodes < 1 or not 0 <= node_rank < num_nodes:
        raise ConfigError(f"node_rank is {node_rank} of num_nodes {num_nodes}; expected 0 to {max(num_nodes, 1) - 1}")
    _check_args(function, args)
    if has_tpu(os.environ):
        return [_call_on_tpu(function, args, num_processes, str(mixed_precision).lower())]
    place = place_of(os.environ, sys.modules)
    count = processes_for(num_processes, place, count_accelerators)
    if count < (num_processes or 1):
        print(f"{place} offers no second GPU here: {count} process instead of {num_processes}.")
    address, port = _endpoint(rdzv_endpoint, master_addr, use_port)
    settings: dict[str, object] = {
        "mixed_precision": str(mixed_precision).lower(),
        "num_processes": count * num_nodes,
        "max_restarts": max_restarts,
        "monitor_interval": monitor_interval,
    }
    if num_nodes > 1:
        settings |= {"num_machines": num_nodes, "machine_rank": node_rank}
        settings |= {"main_process_ip": address, "main_process_port": port}
        settings |= _patience(rdzv_conf)
    elif str(port) != _ANY_PORT:
        settings["main_process_port"] = port
    return _launch(function, args, settings, template=log_line_prefix_template)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Calls ``function(*args)`` in ``num_processes`` processes on the CPU, and returns their results, by rank.

    For tests: the environment is that of ``accel launch --cpu``, including local ranks.

    Raises:
        ConfigError: ``args`` are not a sequence.
        LaunchError: a process failed, with the traceback of the first; or the function cannot be serialized.
    """
    __tracebackhide__ = True
    _check_args(function, args)
    return _launch(function, args, {"num_processes": num_processes, "cpu": True, "mixed_precision": "no"})


def _launch(
    function: Callable[..., Any], args: Sequence[Any], settings: Mapping[str, object], *, template: str | None = None
) -> list[Any]:
    __tracebackhide__ = True
    env = without_launcher(os.environ)
    config = resolve_config(settings, {})
    if config.num_processes == 1 and config.num_machines == 1:
        return [_call_here(function, args, config)]
    with tempfile.TemporaryDirectory(prefix="accel_notebook_") as folder:
        pack_call(Path(folder), function, args)
        flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in settings.items()]
        program = ["--end_with_stdin", "-m", _WORKER, folder, *([] if template is None else [template])]
        command = [sys.executable, "-m", "accel_launch.cli", "launch", *flags, *program]
        status, said = run_in_cell(command, env)
        if status:
            raise LaunchError(said.strip() or f"the launcher ended with status {status}; what it said is above")
        local = (config.num_processes or 1) // config.num_machines
        return unpack_results(Path(folder), range(config.machine_rank * local, (config.machine_rank + 1) * local))


def _call_here(function: Callable[..., Any], args: Sequence[Any], config: AccelConfig) -> Any:
    """Calls the function in this process, with its settings in the environment, as a launcher would set them."""
    from accel_state.environment import patch_environment

    __tracebackhide__ = True
    print("Launching on one process, which is this one.")
    with patch_environment(**{DOCUMENT_VARIABLE: config.to_document()}):
        return function(*args)


def _call_on_tpu(
    function: Callable[..., Any], args: Sequence[Any], num_processes: int | None, mixed_precision: str
) -> Any:
    """Calls the function in this process, which drives all cores of the TPU; keeps ``PJRT_DEVICE`` if it is set."""
    from accel_launch.launch.remote.tpu import require_library
    from accel_state.environment import patch_environment

    require_library(os.environ)
    if num_processes not in (None, 1):
        raise ConfigError(
            f"num_processes is {num_processes}: on a TPU one process, this one, drives all cores; leave it out"
        )
    config = resolve_config({"num_processes": 1, "mixed_precision": mixed_precision}, {})
    with patch_environment(PJRT_DEVICE=os.environ.get("PJRT_DEVICE") or "TPU"):
        return _call_here(function, args, config)


def _check_args(function: Callable[..., Any], args: object) -> None:
    __tracebackhide__ = True
    if not callable(function):
        raise ConfigError(f"function is {function!r}; expected one that can be called: give train, not train()")
    if isinstance(args, str | bytes | Mapping) or not isinstance(args, Iterable):
        raise ConfigError(f"args is {args!r}; expected a tuple of the function's arguments: ({args!r},)")


def _endpoint(endpoint: str, address: str, port: str | int) -> tuple[str, int]:
    host, colon, given = endpoint.rpartition(":")
    text = given if colon else str(port)
    if not text.isdigit():
        raise ConfigError(f"the port is {text!r}; expected a number, in use_port or after the colon of rdzv_endpoint")
    return (host if colon else endpoint or address), int(text)


def _patience(conf: Mapping[str, Any] | None) -> dict[str, object]:
    for name in ("join_timeout", "timeout"):
        if conf and name in conf:
            return {"join_timeout": f"{conf[name]}s"}
    return {}


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else ""
