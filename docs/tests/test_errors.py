"""The page of errors has a section for each class that users meet."""

from ci.site_pages import ROOT, exported


def test_every_public_error_has_a_section() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    names = {export.name for listed in exported().values() for export in listed if export.name.endswith("Error")}
    assert len(names) > 10
    assert {name for name in names if f"\n## {name}\n" not in page} == set()
