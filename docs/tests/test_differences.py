"""The page of intended differences and the table of ``accel migrate`` have the same rows."""

from accel_compat.migration.differences import DIFFERENCES, UNSEEN
from ci.site_pages import ROOT, migration_page


def rows() -> list[str]:
    page = (ROOT / "docs" / "reference" / "differences.md").read_text(encoding="utf-8")
    table = page.partition("\nThese are additions")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]]


def test_every_difference_of_the_page_is_reported_or_said_not_to_be() -> None:
    reported = [one.subject for one in DIFFERENCES if one.subject]
    assert len(rows()) > 30
    assert sorted(rows()) == sorted([*reported, *UNSEEN])


def test_the_page_of_rules_has_a_row_for_each() -> None:
    page = migration_page()
    assert [one.rule for one in DIFFERENCES if f"\n| `{one.rule}` | {one.kind} | " not in page] == []
