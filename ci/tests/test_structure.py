"""The structure of the sources is measured as check_structure.py says."""

from pathlib import Path

import pytest

from ci.check_structure import cycles, floors, imports, intruders, rooms, strangers

SOURCES = {
    "p": "",
    "p.low": "",
    "p.high": "from typing import TYPE_CHECKING\nfrom p import low\nif TYPE_CHECKING:\n    from p.top import name\n",
    "p.top": "import p.high\ndef use():\n    from p.room.inner import thing\n",
    "p.room": "",
    "p.room.inner": "from p.low import something\n",
}


@pytest.fixture
def modules(tmp_path: Path) -> dict[str, Path]:
    found = {}
    for name, text in SOURCES.items():
        found[name] = tmp_path / f"{name}.py"
        found[name].write_text(text)
    return found


def test_imports_for_types_do_not_count_and_lazy_ones_do_if_asked(modules: dict[str, Path]) -> None:
    eager, lazy = imports(modules, lazy=False), imports(modules, lazy=True)
    assert eager["p.high"] == lazy["p.high"] == {"p.low"}
    assert eager["p.top"] == {"p.high"}
    assert lazy["p.top"] == {"p.high", "p.room.inner"}


def test_rooms_are_the_top_of_a_package(modules: dict[str, Path]) -> None:
    between = rooms(imports(modules, lazy=True), "p")
    assert between == {"high": {"low"}, "low": set(), "top": {"high", "room"}, "room": {"low"}}
    assert floors(between) == 3


def test_cycles_are_found_and_share_a_floor() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}
    assert cycles(graph) == [["a", "b", "c"]]
    assert floors(graph) == 2
    assert cycles({"a": {"b"}, "b": set()}) == []


def test_a_folder_of_tests_without_sources_is_named(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "one"
    (package / "src" / "one" / "room").mkdir(parents=True)
    for folder in ("room", "attic", "data", "conformance"):
        (package / "tests" / folder).mkdir(parents=True)
    for folder in ("room", "attic", "conformance"):
        (package / "tests" / folder / "test_x.py").touch()
    (tmp_path / "testing" / "tests").mkdir(parents=True)
    assert list(strangers(tmp_path)) == ["packages/one/tests/attic: the sources have no folder 'attic'"]


def test_reads_of_an_accelerators_private_attributes_are_named(tmp_path: Path) -> None:
    text = "def f(accelerator, self):\n    accelerator._models\n    self._accelerator._clock\n"
    modules = {name: tmp_path / f"{name}.py" for name in ("other.module", "accel.accelerator")}
    for path in modules.values():
        path.write_text(text + "    accelerator.__class__\n    self._accelerator.clock\n    accelerator.clock._step\n")
    assert list(intruders(modules)) == [
        "other.module:2: reads _models of an Accelerator; pass the part as an argument",
        "other.module:3: reads _clock of an Accelerator; pass the part as an argument",
    ]
