"""Position of this machine in a TPU pod, read from the environment or from the metadata server."""

import re
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from accel_launch.config.model import AccelConfig, Origin
from accel_launch.launch.checks import machine_range
from accel_launch.launch.supervisor.ports import DEFAULT_PORT
from accel_state.clusters.tpu import PodPlace
from accel_state.environment import parse_flag
from accel_state.errors import LaunchError

_PRODUCT = Path("/sys/class/dmi/id/product_name")
_SERVER = "metadata.google.internal"
_PATIENCE_S = 5.0


def on_pod(config: AccelConfig, env: Mapping[str, str]) -> AccelConfig:
    """Adds this machine's rank and the pod's number of machines, if the pod has several; given settings are kept.

    Raises:
        LaunchError: the given number of machines is not the pod's, or the machine's rank cannot be determined.
        TopologyError: the variables contradict each other.
    """
    if config.is_given("machine_rank") and config.main_process_ip is not None:
        return config
    place = PodPlace.from_env(env) or _ask(env)
    if place is None:
        return config
    count = len(place.addresses)
    if (config.is_given("num_machines") or config.nnodes is not None) and machine_range(config) != (count, count):
        given = "nnodes" if config.nnodes is not None else "num_machines"
        raise LaunchError(
            f"{given} is {getattr(config, given)}, but this TPU pod has {count} machines, which compute as one; drop it"
        )
    found: dict[str, Any] = {"num_machines": count, "machine_rank": place.worker}
    if config.num_processes in (None, 1):
        found["num_processes"] = count
    found["main_process_ip"] = config.main_process_ip or place.addresses[0]
    found["main_process_port"] = config.main_process_port or DEFAULT_PORT
    origins = {**config.origins, **{name: Origin("env", "TPU pod") for name in found if not config.is_given(name)}}
    return replace(config, origins=origins, **found)


def _ask(env: Mapping[str, str]) -> PodPlace | None:
    """Reads the pod from Google's metadata server; None on other machines, and for a pod of one machine.

    Reads the same attributes as torch_xla. ``GCE_METADATA_HOST`` replaces the server's name, and ``TPU_SKIP_MDS_QUERY``
    disables the query.
    """
    server = env.get("GCE_METADATA_HOST")
    if parse_flag(env, "TPU_SKIP_MDS_QUERY") or not (server or _is_of_google()):
        return None
    endpoints = _attribute(server or _SERVER, "worker-network-endpoints")
    addresses = tuple(part.split(":")[2] for part in (endpoints or "").split(",") if part.count(":") >= 2)
    if len(addresses) < 2:
        return None
    number = re.search(r"^WORKER_ID:\s*['\"]?(\d+)", _attribute(server or _SERVER, "tpu-env") or "", re.MULTILINE)
    if number is None:
        raise LaunchError(
            f"this is one of {len(addresses)} machines of a TPU pod, which one its server of metadata does not say; "
            "give --machine_rank and --main_process_ip, or TPU_WORKER_ID and TPU_WORKER_HOSTNAMES in the environment"
        )
    return PodPlace(int(number[1]), addresses)


def _attribute(server: str, name: str) -> str | None:
    address = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    direct = build_opener(ProxyHandler({}))
    try:
        with direct.open(Request(address, headers={"Metadata-Flavor": "Google"}), timeout=_PATIENCE_S) as answer:
            return str(answer.read().decode("utf-8"))
    except OSError as error:
        if isinstance(error, HTTPError) and error.code == HTTPStatus.NOT_FOUND:
            return None  # a machine without a TPU
        raise LaunchError(f"cannot ask {address} which machine of a TPU pod this is: {error}") from error


def _is_of_google() -> bool:
    try:
        return _PRODUCT.read_text(encoding="ascii", errors="replace").startswith("Google")
    except OSError:
        return False
