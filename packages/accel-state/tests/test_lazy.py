"""Names of a package come from where its stub says, when they are first asked for."""

import json
import sys
from types import ModuleType

import pytest

from accel_state.lazy import attach_stub

STUB = """from . import scanner as scanner
from json import dumps as dumps
from json import loads as read  # noqa: F401
from json.encoder import (
    ESCAPE_ASCII as ESCAPE_ASCII,
)

later: int
"""


@pytest.fixture
def init(tmp_path):
    (tmp_path / "__init__.pyi").write_text(STUB)
    return str(tmp_path / "__init__.py")


@pytest.fixture
def package(init):
    module = ModuleType("json")
    module.__path__ = json.__path__
    module.__getattr__, module.__dir__, module.__all__ = attach_stub("json", init)
    return module


def test_a_name_is_that_of_its_module(package):
    assert package.dumps is json.dumps
    assert package.ESCAPE_ASCII is json.encoder.ESCAPE_ASCII


def test_a_name_may_be_another_one_there(package):
    assert package.read is json.loads


def test_a_submodule_is_an_attribute_and_not_public(package):
    assert package.scanner is sys.modules["json.scanner"]
    assert package.__all__ == ["ESCAPE_ASCII", "dumps", "read"] == dir(package)


def test_another_name_is_no_attribute(package):
    with pytest.raises(AttributeError, match=r"module 'json' has no attribute 'dump_all'"):
        package.dump_all  # noqa: B018


def test_advice_is_added_to_the_error_about_a_name(init, monkeypatch):
    adviser = ModuleType("adviser")
    adviser.advice = lambda name: ": use dumps" if name == "dump_all" else ""
    monkeypatch.setitem(sys.modules, "adviser", adviser)
    find, _, _ = attach_stub("json", init, advice="adviser")
    with pytest.raises(AttributeError, match=r"no attribute 'dump_all': use dumps$"):
        find("dump_all")
    with pytest.raises(AttributeError, match=r"no attribute 'dump_none'$"):
        find("dump_none")


def test_nothing_is_imported_before_it_is_asked_for(tmp_path):
    (tmp_path / "__init__.pyi").write_text("from json.tool import main as main\n")
    sys.modules.pop("json.tool", None)
    find, _, _ = attach_stub("json", str(tmp_path / "__init__.py"))
    assert "json.tool" not in sys.modules
    find("main")
    assert "json.tool" in sys.modules


def test_dir_lists_the_public_names():
    import accel_state

    assert dir(accel_state) == sorted(accel_state.__all__)
