"""Generated pages of the site name everything public, and no page denies what exists."""

import re

import pytest

from accel_launch.config import settings
from ci.site_pages import ROOT, commands, exported, origin, pages, paths, public_names, without_roles

DENIAL = re.compile(
    r"\b(?:not|nor)(?: yet)? (?:supported|implemented)\b|\bnot there yet\b|\bdoes not exist yet\b|\bno such backend\b",
    re.IGNORECASE,
)
CONTEXT, PIPELINE = "accel_state.TorchContextParallelConfig", "accel_backends.PipelineBackend"
# Patterns of a feature's name, and the export that makes it exist.
FEATURES = {
    "big-model inference|models larger than": "accel.dispatch_model",
    "tensor parallelism": "accel_state.TorchTensorParallelConfig",
    "context (and pipeline )?parallelism": CONTEXT,
    "pipeline (and context )?parallelism": PIPELINE,
    "Megatron": "accel_megatron.MegatronBackend",
    "quantized models": "accel_inference.load_and_quantize_model",
    "trackers": "accel_observe.tracking.GeneralTracker",
    "profiler": "accel.ProfileKwargs",
    "DeepSpeed": "accel.DeepSpeedPlugin",
}


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """All generated pages, by path."""
    return pages()


def denials(text: str) -> list[str]:
    """Clauses that say that something does not exist yet."""
    return [clause for clause in re.split(r"(?<=[.;])\s+|\n\n|\|", text) if DENIAL.search(clause)]


def denied_names(text: str) -> set[str]:
    """Public names and known features that a text denies."""
    found = set()
    for clause in denials(text):
        found |= public_names() & set(re.findall(r"`([\w.]+)`", clause))
        found |= {
            name
            for pattern, name in FEATURES.items()
            if re.search(pattern, " ".join(clause.split()), re.IGNORECASE) and name in public_names()
        }
    return found


def test_the_paths_are_those_of_the_pages(made: dict[str, str]) -> None:
    assert sorted(made) == paths()


@pytest.mark.parametrize("package", sorted({path.split(".")[0] for path in exported()}))
def test_every_public_name_of_a_package_has_an_entry(package: str, made: dict[str, str]) -> None:
    page = made[f"reference/api/{package}.md"]
    recorded = (ROOT / "ci" / "api" / f"{package}.txt").read_text(encoding="utf-8").split()
    exports = {export.name: export for export in exported()[package]}
    names = [name for name in recorded if not name.startswith("_") and name in exports]
    assert names, "the package exports nothing"
    for name in names:
        module, original = origin(exports[name])
        assert f"::: {module}.{original}\n" in page or f"| `{name}` | " in page, name


def test_every_recorded_name_is_exported() -> None:
    for path in (ROOT / "ci" / "api").glob("*.txt"):
        recorded = {name for name in path.read_text(encoding="utf-8").split() if not name.startswith("_")}
        assert recorded <= {export.name for export in exported()[path.stem]}, path.stem


def test_the_command_line_page_has_every_command_and_its_own_options(made: dict[str, str]) -> None:
    page = made["reference/command-line.md"]
    assert [name for name in commands() if f"\n## accel {name}\n" not in page] == []
    for flag in ("--dry_run", "--config_file", "--devices"):
        assert f"`{flag}`" in page, flag
    assert "### accel config validate" in page


def test_the_settings_page_has_every_setting_with_flag_variables_and_default(made: dict[str, str]) -> None:
    page = made["reference/settings.md"]
    for name, row in settings().items():
        assert f"\n### {name}\n" in page
        assert all(f"`{variable}`" in page for variable in row.variables)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("`DeepSpeedPlugin` is not supported yet.", {"DeepSpeedPlugin", "accel.DeepSpeedPlugin"}),
        ("The trackers are\nnot there yet.", {"accel_observe.tracking.GeneralTracker"}),
        ("| `agree` is not supported yet |", {"agree"}),
        ("The profiler is not yet implemented.", {"accel.ProfileKwargs"}),
        ("Neither fp8 nor `save` is supported; `agree` does not exist yet.", {"agree"}),
        ("Context and pipeline parallelism are not supported.", {CONTEXT, PIPELINE}),
        ("| `utils.x` | none: no such backend for Megatron |", {"accel_megatron.MegatronBackend"}),
        ("[Pipeline parallelism](p.md) has a backend. Context parallelism is not supported yet: refused", {CONTEXT}),
        ("Models on the meta device are not supported. `agree` is.", set()),
    ],
)
def test_a_denial_of_something_that_exists_is_found(text: str, names: set[str]) -> None:
    assert denied_names(text) == names


def test_every_known_feature_exists() -> None:
    assert set(FEATURES.values()) <= public_names()


def test_no_page_denies_something_that_exists() -> None:
    files = [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("packages/*/README.md"),
        ROOT / "testing/README.md",
    ]
    found = {str(file.relative_to(ROOT)): denied_names(file.read_text(encoding="utf-8")) for file in files}
    assert {page: names for page, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (":func:<code>gather</code>", "<code>gather</code>"),
        (":class:<code>~accel_state.errors.CollectiveError</code>", "<code>CollectiveError</code>"),
        (":func:<code>accel_state.process.split</code>", "<code>accel_state.process.split</code>"),
        ("a note:<code>x</code>", "a note:<code>x</code>"),
    ],
)
def test_names_of_docstrings_are_shown_without_markup(written: str, shown: str) -> None:
    assert without_roles(written) == shown
