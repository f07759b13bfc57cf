"""The backend of the page is the one that the tests of accel install and train with."""

import tomllib
from pathlib import Path

from docs.tests.pages import ROOT, blocks_of

PAGE = "docs/internals/adding-a-backend.md"
BACKEND = Path("packages/accel/tests/setup/torch_tensor_parallel.py")


def test_the_page_shows_the_module_that_is_tested() -> None:
    (code,) = [block.text for block in blocks_of(PAGE) if block.language == "python"]
    assert code == (ROOT / BACKEND).read_text(encoding="utf-8")


def test_the_entry_point_of_the_page_names_the_class_of_the_module() -> None:
    (text,) = [block.text for block in blocks_of(PAGE) if block.language == "toml"]
    ((name, value),) = tomllib.loads(text)["project"]["entry-points"]["accel.backends"].items()
    module, _, kind = value.partition(":")
    source = (ROOT / BACKEND).read_text(encoding="utf-8")
    assert module == BACKEND.stem
    assert f"class {kind}(ModuleBackend):" in source
    assert source.count(f'ClassVar[str] = "{name}"') == 2
