"""The main module of each process of ``notebook_launcher``: runs the call, and returns its result.

accel launch ... -m accel_launch.notebook.child_main FOLDER [TEMPLATE]
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import TextIO, final

from accel_launch.notebook.serialized_call import pack_result, unpack_call


@final
class Prefixed:
    """Text stream that writes a prefix before each line."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream = stream
        self._prefix = prefix
        self._at_start = True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self._stream.write(f"{self._prefix}{line}" if self._at_start else line)
            self._at_start = line.endswith(("\n", "\r"))
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def prefix_of(template: str, env: Mapping[str, str]) -> str:
    """Fills the rank into ``template``, as torchrun does with ``log_line_prefix_template``."""
    place = {
        "rank": env["RANK"],
        "local_rank": env["LOCAL_RANK"],
        "role_name": env.get("ROLE_NAME", "default"),
    }
    return Template(template).safe_substitute(place)


def main(arguments: list[str]) -> None:
    """Runs the call of the folder, and writes its result there."""
    folder, *template = arguments
    if template:
        prefix = prefix_of(template[0], os.environ)
        sys.stdout = Prefixed(sys.stdout, prefix)
        sys.stderr = Prefixed(sys.stderr, prefix)
    function, args = unpack_call(Path(folder))
    result = function(*args)
    sys.stdout.flush()
    pack_result(Path(folder), int(os.environ["RANK"]), result)


if __name__ == "__main__":
    main(sys.argv[1:])
