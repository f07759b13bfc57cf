"""Private names of torch, and class names used twice, are found where check_house.py says that they are."""

import ast
from pathlib import Path

import pytest

from ci.check_house import name_complaints, private_complaints

PRIVATE = (
    Path("p/private.py"),
    "def drop(loader):\n    loader._iterator = None\n    return getattr(loader, '_workers', ())\n",
)


def complaints(source: str) -> list[str]:
    modules = dict([PRIVATE, (Path("p/module.py"), source)])
    return list(private_complaints({path: ast.parse(text) for path, text in modules.items()}))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C._get_tracing_state()", "_get_tracing_state"),
        ("from torch._utils import thing", "_utils"),
        ("import torch.distributed as dist\ndist.distributed_c10d._world", "_world"),
        ("PRELOADED = 'torch._dynamo'", "_dynamo"),
        ("def f(loader):\n    return loader._iterator", "_iterator"),
        ("def f(loader):\n    return getattr(loader, '_workers')", "_workers"),
        ("def f(loader):\n    vars(loader).update(_iterator=None)", "_iterator"),
    ],
)
def test_a_private_name_outside_private_py_is_named(source, name):
    assert any(f" {name} is a private name of torch" in text for text in complaints(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "from torch.distributed import fsdp\nfsdp.fully_shard",
        "class Own:\n    def __init__(self):\n        self._iterator = None",
        "def _workers():\n    return '_workers'",
        "def f(other):\n    return other._unknown",
    ],
)
def test_own_and_public_names_are_not_named(source):
    assert complaints(source) == []


def test_a_class_name_that_two_modules_use_is_named():
    trees = {
        Path("p/one.py"): ast.parse("class A: ...\nclass _B: ..."),
        Path("q/two.py"): ast.parse("class A: ...\nclass _B: ..."),
    }
    assert list(name_complaints(trees)) == ["q/two.py:1: p/one.py has a class A already"]
