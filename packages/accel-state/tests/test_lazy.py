"""Names of a package come from where they are defined, when they are first asked for."""

import json
import sys
from types import ModuleType

import pytest

from accel_state.lazy import lazy_names

PLACES = {"dumps": "json", "read": "json:loads", "decoder": "json.decoder:", "scanner": ".scanner:"}


@pytest.fixture
def package(monkeypatch):
    module = ModuleType("json")
    module.__all__ = sorted(PLACES)
    module.__path__ = json.__path__
    module.__getattr__, module.__dir__ = lazy_names("json", PLACES)
    return module


def test_a_name_is_that_of_its_module(package):
    assert package.dumps is json.dumps


def test_a_name_may_be_another_one_there(package):
    assert package.read is json.loads


def test_a_module_may_be_a_name(package):
    assert package.decoder is sys.modules["json.decoder"]
    assert package.scanner is sys.modules["json.scanner"]


def test_another_name_is_no_attribute(package):
    with pytest.raises(AttributeError, match=r"module 'json' has no attribute 'dump_all'"):
        package.dump_all  # noqa: B018


def test_advice_is_added_to_the_error_about_a_name(monkeypatch):
    adviser = ModuleType("adviser")
    adviser.advice = lambda name: ": use dumps" if name == "dump_all" else ""
    monkeypatch.setitem(sys.modules, "adviser", adviser)
    find, _ = lazy_names("json", PLACES, advice="adviser")
    with pytest.raises(AttributeError, match=r"no attribute 'dump_all': use dumps$"):
        find("dump_all")
    with pytest.raises(AttributeError, match=r"no attribute 'dump_none'$"):
        find("dump_none")


def test_nothing_is_imported_before_it_is_asked_for():
    lazy = lazy_names("json", {"tool": "json.tool:"})
    sys.modules.pop("json.tool", None)
    assert "json.tool" not in sys.modules
    lazy[0]("tool")
    assert "json.tool" in sys.modules


def test_dir_lists_the_public_names():
    _, names = lazy_names("accel_state", {})
    import accel_state

    assert names() == sorted(accel_state.__all__) == dir(accel_state)
