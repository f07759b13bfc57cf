"""Renamed imports: formats are preserved, and every name that a script imports from accel exists."""

import ast
import importlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from accel_compat.finder import TREE
from accel_compat.migration.script import check_script

ROOT = Path(__file__).parents[4]


def written(tmp_path: Path, text: str) -> str:
    script = tmp_path / "script.py"
    script.write_bytes(text.encode())
    report = check_script(script, write=True)
    assert not report.error
    return script.read_bytes().decode()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from accelerate import Accelerator\n", "from accel import Accelerator\n"),
        (
            "from accelerate.utils import set_seed as seed  # kept\n",
            "from accel.utils import set_seed as seed  # kept\n",
        ),
        (
            "from accelerate import (  # all\n    Accelerator,\n    skip_first_batches,  # one\n)\n",
            "from accel import (  # all\n    Accelerator,\n    skip_first_batches,  # one\n)\n",
        ),
        ("from accelerate.utils.tqdm import tqdm\n", "from accel.utils import tqdm\n"),
        ("from accelerate.tracking import GeneralTracker\n", "from accel.tracking import GeneralTracker\n"),
        ("from accelerate import utils\nutils.set_seed(0)\n", "from accel import utils\nutils.set_seed(0)\n"),
        (
            "from accelerate.utils import MegatronLMPlugin, set_seed\n",
            "from accel_megatron import MegatronLMPlugin\nfrom accel.utils import set_seed\n",
        ),
        ("import accelerate\naccelerate.Accelerator()\n", "import accel\naccel.Accelerator()\n"),
        ("import accelerate.hooks\naccelerate.hooks.ModelHook\n", "import accel.hooks\naccel.hooks.ModelHook\n"),
        (
            "import accelerate\nlog = accelerate.logging.get_logger('é')\n",
            "import accel\nlog = accel.logging.get_logger('é')\n",
        ),
        ("import accelerate as ä\nf('é', ä.utils.set_seed)\n", "import accel as ä\nf('é', ä.utils.set_seed)\n"),
        (
            "import accelerate\naccelerate.utils.dataclasses.KwargsHandler\n",
            "import accel\naccel.utils.KwargsHandler\n",
        ),
        ("import os, accelerate as acc, sys\n", "import os, accel as acc, sys\n"),
        (
            "import accelerate\naccel = accelerate.Accelerator()\n",
            "import accel as accelerate\naccel = accelerate.Accelerator()\n",
        ),
        (
            "try:\r\n    import accelerate\r\nexcept ImportError:\r\n    pass\r\n",
            "try:\r\n    import accel\r\nexcept ImportError:\r\n    pass\r\n",
        ),
        (
            "x = 1; from accelerate import Accelerator, PartialState; y = 2\n",
            "x = 1; from accel import Accelerator, PartialState; y = 2\n",
        ),
        ("x = 'accelerate'  # accelerate\n", "x = 'accelerate'  # accelerate\n"),
        (
            "import accelerator_tools\nfrom .accelerate import x\n",
            "import accelerator_tools\nfrom .accelerate import x\n",
        ),
    ],
)
def test_imports_are_renamed_and_everything_else_keeps_its_bytes(tmp_path, before, after):
    assert written(tmp_path, before) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "import accelerate.test_utils.testing, sys\nx = accelerate.Accelerator\n",
            "import accelerate.test_utils.testing, accel, sys\nx = accel.Accelerator\n",
        ),
        (
            "def f():\n    import accelerate.commands as c, accelerate.test_utils  # kept\n    accelerate.utils\n",
            "def f():\n    import accelerate.commands as c, accelerate.test_utils, accel  # kept\n    accel.utils\n",
        ),
        (
            "import accelerate.test_utils.testing\naccelerate.test_utils.testing.run_command()\n",
            "import accelerate.test_utils.testing\naccelerate.test_utils.testing.run_command()\n",
        ),
        (
            "import accelerate.test_utils\naccel = accelerate.utils.dataclasses.KwargsHandler\n",
            "import accelerate.test_utils\naccel = accelerate.utils.dataclasses.KwargsHandler\n",
        ),
        (
            "import accelerate, accelerate.test_utils\naccel = accelerate.Accelerator\n",
            "import accelerate, accelerate.test_utils\naccel = accelerate.Accelerator\n",
        ),
        (
            "def f():\n    global accelerate\n    import accelerate\naccelerate.Accelerator\n",
            "def f():\n    global accelerate\n    import accel as accelerate\naccelerate.Accelerator\n",
        ),
        (
            "def f():\n    accel = 1\n    def g():\n        nonlocal accel\n        import accelerate\n",
            "def f():\n    accel = 1\n    def g():\n        nonlocal accel\n        import accel as accelerate\n",
        ),
    ],
)
def test_a_name_that_is_used_is_still_bound(tmp_path, before, after):
    assert written(tmp_path, before) == after


@contextmanager
def files_of_at_most(length: int) -> Iterator[None]:
    """Limits the length of a file, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_leaves_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import accelerate\n")
    with files_of_at_most(4):
        report = check_script(script, write=True)
    assert "File too large" in report.error
    assert script.read_text() == "import accelerate\n"
    assert list(tmp_path.iterdir()) == [script]


def test_a_script_that_is_written_keeps_its_mode_and_its_link(tmp_path):
    script, link = tmp_path / "script.py", tmp_path / "link.py"
    script.write_text("import accelerate\n")
    script.chmod(0o754)
    link.symlink_to(script)
    assert not check_script(link, write=True).error
    assert link.is_symlink()
    assert script.read_text() == "import accel\n"
    assert script.stat().st_mode & 0o777 == 0o754


def test_a_divided_import_keeps_its_comments_and_its_indentation(tmp_path):
    names = "        get_grad_scaler,  # inner\n        set_seed as seed,\n"
    before = f"def f():\n    from accelerate.utils import (\n{names}    )\n"
    after = (
        "def f():\n    # inner\n    from accelerate.utils import get_grad_scaler\n"
        "    from accel.utils import set_seed as seed\n"
    )
    assert written(tmp_path, before) == after


def test_an_encoding_other_than_utf8_stays(tmp_path):
    script = tmp_path / "script.py"
    script.write_bytes("# -*- coding: latin-1 -*-\nä = 'é'; import accelerate\n".encode("latin-1"))
    check_script(script, write=True)
    assert script.read_bytes() == "# -*- coding: latin-1 -*-\nä = 'é'; import accel\n".encode("latin-1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from accelerate.utils import get_grad_scaler\n", "1:30: change [name] accel lacks get_grad_scaler of"),
        ("from accelerate.utils import is_tpu_available\n", "Accelerate 1.15 has no accelerate.utils.is_tpu_available"),
        ("from accelerate.test_utils import RegressionModel\n", "the package accel_testing tests programs here"),
        ("import accelerate.commands\n", "accel has no module for accelerate.commands; accel launch"),
        ("import accelerate\naccelerate.utils.fsdp_utils.fsdp2_prepare_model\n", "2:1: change [name]"),
        (
            "from accelerate.utils import *\n",
            "note [import] * imports the names of accel.utils, which are fewer; calls of them are not checked",
        ),
        (
            "import accelerate.test_utils.testing\naccelerate.Accelerator\n",
            "rename [import] accelerate is accel; accel",
        ),
    ],
)
def test_names_that_stay_are_reported_with_a_remedy(tmp_path, text, message):
    script = tmp_path / "script.py"
    script.write_text(text)
    assert any(message in str(one) for one in check_script(script).findings)


def names_from_accel(tree: ast.Module) -> set[tuple[str, str]]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    found = {(node.module or "", alias.name) for node in nodes for alias in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] in ("accel", "accel_megatron")}


def exists(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(module), name)


STUBS = sorted(TREE.rglob("*.pyi"))


def test_every_name_of_accelerate_is_imported_from_where_accel_has_it_or_reported(tmp_path):
    """One line for each of Accelerate's names, in each module that has it."""
    modules = {stub: ".".join(("accelerate", *stub.relative_to(TREE).with_suffix("").parts)) for stub in STUBS}
    lines = []
    for stub, module in modules.items():
        names = [
            alias.asname
            for node in ast.walk(ast.parse(stub.read_text()))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name != "*"
        ]
        lines += [f"from {module.removesuffix('.__init__')} import {name}" for name in names if name]
    script = tmp_path / "script.py"
    script.write_text("\n".join(lines) + "\n")
    report = check_script(script, write=True)
    kept = {one.line for one in report.findings if one.kind == "change"}
    made = script.read_text().splitlines()
    assert len(made) == len(lines) > 700
    assert {line for line, text in enumerate(made, 1) if text.startswith("from accelerate")} == kept
    found = names_from_accel(ast.parse(script.read_text()))
    assert len(found) > 300
    assert [pair for pair in found if not exists(*pair)] == []


OURS = sorted(path for path in (ROOT / "examples").glob("*.py") if "from accel import" in path.read_text())


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_a_script_for_accel_comes_back_from_accelerates_names(tmp_path, path):
    """Names that accel has under Accelerate's paths are renamed there and back."""
    text = path.read_text()
    names = names_from_accel(ast.parse(text))
    theirs = text
    for module in sorted({module for module, _ in names}, key=len, reverse=True):
        theirs = theirs.replace(f"from {module} import", f"from {module.replace('accel', 'accelerate', 1)} import")
    assert theirs != text
    script = tmp_path / "script.py"
    script.write_text(theirs)
    report = check_script(script, write=True)
    after = names_from_accel(ast.parse(script.read_text()))
    left = {one.message.split()[-1] for one in report.findings if one.rule == "name" and one.kind == "change"}
    assert names - after == {pair for pair in names if f"accelerate{pair[0].removeprefix('accel')}.{pair[1]}" in left}
    assert all(exists(*pair) for pair in after)
