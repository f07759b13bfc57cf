"""Generated pages of the site name everything public, and no page denies what exists."""

import re

import pytest

from accel_launch.config import settings
from ci.site_pages import ROOT, commands, exported, origin, pages, paths, public_names

MADE = pages()
DENIAL = re.compile(r"not there yet|(?:not|nor) supported yet|not implemented yet|does not exist yet", re.IGNORECASE)
# Words for a feature, and the exports that make it exist.
FEATURES = {
    "big-model inference": "accel.dispatch_model",
    "trackers": "accel_observe.tracking.GeneralTracker",
    "profiler": "accel.ProfileKwargs",
    "DeepSpeed": "accel.DeepSpeedPlugin",
}


def denials(text: str) -> list[str]:
    """Clauses that say that something does not exist yet."""
    return [clause for clause in re.split(r"(?<=[.;])\s+|\n\n|\|", text) if DENIAL.search(clause)]


def denied_names(text: str) -> set[str]:
    """Public names and known features that a text denies."""
    found = set()
    for clause in denials(text):
        found |= public_names() & set(re.findall(r"`([\w.]+)`", clause))
        found |= {
            name for word, name in FEATURES.items() if word in " ".join(clause.split()) and name in public_names()
        }
    return found


def test_the_paths_are_those_of_the_pages() -> None:
    assert sorted(MADE) == paths()


@pytest.mark.parametrize("package", sorted({path.split(".")[0] for path in exported()}))
def test_every_public_name_of_a_package_has_an_entry(package: str) -> None:
    page = MADE[f"reference/api/{package}.md"]
    recorded = (ROOT / "ci" / "api" / f"{package}.txt").read_text(encoding="utf-8").split()
    exports = {export.name: export for export in exported()[package]}
    names = [name for name in recorded if not name.startswith("_") and name in exports]
    assert names, "the package exports nothing"
    for name in names:
        module, original = origin(exports[name])
        assert f"::: {module}.{original}\n" in page or f"[{module}.{original}]" in page, name


def test_every_recorded_name_is_exported() -> None:
    for path in (ROOT / "ci" / "api").glob("*.txt"):
        recorded = {name for name in path.read_text(encoding="utf-8").split() if not name.startswith("_")}
        assert recorded <= {export.name for export in exported()[path.stem]}, path.stem


def test_the_command_line_page_has_every_command_and_its_own_options() -> None:
    page = MADE["reference/command-line.md"]
    assert [name for name in commands() if f"\n## accel {name}\n" not in page] == []
    for flag in ("--dry_run", "--config_file", "--devices"):
        assert f"`{flag}`" in page, flag
    assert "### accel config validate" in page


def test_the_settings_page_has_every_setting_with_flag_variables_and_default() -> None:
    page = MADE["reference/settings.md"]
    for name, row in settings().items():
        assert f"\n### {name}\n" in page
        assert all(f"`{variable}`" in page for variable in row.variables)


@pytest.mark.parametrize(
    "text",
    [
        "`DeepSpeedPlugin` is not supported yet.",
        "The trackers are\nnot there yet.",
        "| `agree` is not supported yet |",
    ],
)
def test_a_denial_of_something_that_exists_is_found(text: str) -> None:
    assert denied_names(text)


def test_no_page_denies_something_that_exists() -> None:
    files = [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("packages/*/README.md"),
        ROOT / "testing/README.md",
    ]
    found = {str(file.relative_to(ROOT)): denied_names(file.read_text(encoding="utf-8")) for file in files}
    assert {page: names for page, names in found.items() if names} == {}
