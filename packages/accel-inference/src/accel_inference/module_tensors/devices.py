"""Devices that a map names."""

from collections.abc import Mapping

import torch


def check_devices(device_map: Mapping[str, int | str | torch.device]) -> None:
    """Checks that this machine has the devices of a map.

    Raises:
        ValueError: it lacks one, or a word is no device.
    """
    checked: set[str] = set()
    for name, device in device_map.items():
        if str(device) in ("disk", *checked):
            continue
        checked.add(str(device))
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip().partition("\n")[0]
            known = ["'cpu'", "'disk'", *map(str, range(torch.accelerator.device_count()))]
            raise ValueError(
                f"{name or 'the model'} is on {device!r} by the device map, which is no device of this machine; "
                f"expected {', '.join(known)}: {reason}"
            ) from error
