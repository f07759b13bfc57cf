"""The record of Accelerate's names is that of the installed release."""

import ast
import importlib.metadata
from pathlib import Path

import pytest

from accel_compat.finder import VERSION

RECORD = Path(__file__).parents[1] / "data" / "names_1_15.txt"
LEFT_OUT = frozenset(
    (
        *("USE_TORCH_XLA", "FORMAT", "TORCH_SAFE_GLOBALS", "ARGUMENT_KEY_MAPPING", "ARGUMENT_VALUE_MAPPING"),
        *("MODEL_CONFIGS_TO_MEGATRON_PARSERS", "rich"),
    )
)


@pytest.fixture
def installed():
    places = [one for one in importlib.metadata.distributions(name="accelerate") if one.version == VERSION]
    folders = [Path(str(one.locate_file("accelerate"))) for one in places]
    found = [one for one in folders if (one / "state.py").is_file()]
    if not found:
        pytest.skip("Accelerate is not installed: hatch run conformance:test")
    return found[0]


def names_of(path):
    """Public classes, functions and constants that a module defines, and what a package imports from its modules."""
    found, pending = set(), list(ast.parse(path.read_text(encoding="utf-8")).body)
    for node in pending:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(one.id for one in node.targets if isinstance(one, ast.Name) and one.id[0].isupper())
        elif isinstance(node, ast.ImportFrom) and node.level and path.name == "__init__.py":
            found.update(one.asname or one.name for one in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            pending += [*node.body, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())]
    return sorted(name for name in found - LEFT_OUT if not name.startswith("_"))


def test_the_record_has_the_names_of_the_installed_release(installed):
    found = {}
    for path in installed.rglob("*.py"):
        parts = path.relative_to(installed).with_suffix("").parts
        if parts[0] != "test_utils":
            found[".".join(part for part in parts if part != "__init__") or "."] = names_of(path)
    lines = RECORD.read_text(encoding="utf-8").splitlines()
    assert {module: names.split() for module, names in (line.split(":") for line in lines)} == found
