"""Facts about this machine, and whether the program exists."""

import sys
from importlib.machinery import ModuleSpec

import pytest

from accel_launch.config.model import AccelConfig
from accel_launch.launch.host import check_program
from accel_state.errors import LaunchError


class Finder:
    """Finder of a package that is installed for development, as setuptools adds one to ``sys.meta_path``."""

    @staticmethod
    def find_spec(name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "packed_elsewhere" else None


@pytest.mark.parametrize("name", ["json.tool", "sys", "zipimport", "packed_elsewhere.train"])
def test_a_module_is_found_wherever_python_finds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    check_program(AccelConfig(module=True), [name])


def test_a_module_that_no_finder_knows_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"no module 'packed_elsewhere' for -m packed_elsewhere\.train"):
        check_program(AccelConfig(module=True), ["packed_elsewhere.train"])
