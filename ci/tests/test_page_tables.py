"""Generated tables of a page are compared with what is kept, or written."""

from pathlib import Path

import pytest

from ci import page_tables
from ci.page_tables import GeneratedTables


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GeneratedTables:
    monkeypatch.setattr(page_tables, "ROOT", tmp_path)
    made = GeneratedTables(tmp_path / "page.md", "python x.py")
    made.page.write_text("Before.\n\n<!-- begin: python x.py --update -->\n\nold\n\n<!-- end -->\n\nAfter.\n")
    return made


def test_a_page_with_other_tables_is_named_with_the_command(
    tables: GeneratedTables, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tables.settle("old", write=False) == 0
    assert capsys.readouterr().out == ""
    assert tables.settle("new", write=False) == 1
    assert "page.md has other results than those kept; run: python x.py --update" in capsys.readouterr().out
    assert "old" in tables.page.read_text()


def test_what_is_written_stands_between_the_comments(tables: GeneratedTables) -> None:
    before = tables.page.read_text()
    assert tables.settle("new", write=True) == 0
    assert tables.page.read_text() == before.replace("old", "new")
