"""Code on the pages runs as it stands, on one process and on two, and links lead to something."""

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from accel_testing.programs.runs import run_command
from ci.site_pages import paths
from docs.tests.commands import HERE, ON_WHEELS, RUN_BY_OTHERS, WITH_COMMANDS, commands_of, environment, run_commands
from docs.tests.pages import FENCE, ON_CPU, PAGES, README, ROOT, WITH_PYTHON, script_of, shown


def run_blocks(page: str) -> set[str]:
    """Runs a page's Python under the page's name and lines, and returns the names that it has bound."""
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(script_of(page), str(ROOT / page), "exec"), names)
    return set(names)


def bound_by(page: str) -> set[str]:
    """Names that the page's blocks of Python import or assign, block by block."""
    bound: set[str] = set()
    for block in shown(page):
        for node in ast.parse(block.text).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.Assign):
                bound |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return bound


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.ranks(ranks, group=ranks > 1, env=ON_CPU), id=f"{page}-{ranks}")
        for page in WITH_PYTHON
        for ranks in (1, 2)
    ],
)
def test_python_of_a_page_runs_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bound_by(page) <= run_blocks(page)


@pytest.mark.gpu
@pytest.mark.ranks(1, group=False)
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_of_a_page_runs_on_an_accelerator(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bound_by(page) <= run_blocks(page)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page in RUN_BY_OTHERS else ()) for page in HERE]
)
def test_commands_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    run_commands(page, tmp_path)


def train_script(folder: Path) -> Path:
    (example,) = shown(README)
    (folder / "train.py").write_text(example.text, encoding="utf-8")
    return folder / "checkpoints" / "1"


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "accel", "launch", "--num_processes", "2", "train.py"],
        pytest.param(
            ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--log_dir", "logs", "train.py"],
            marks=pytest.mark.slow,
        ),
        ["train.py"],
    ],
    ids=["accel-launch", "torchrun", "python"],
)
def test_the_example_runs_however_it_is_started(command: list[str], tmp_path: Path) -> None:
    checkpoint = train_script(tmp_path)
    said = run_command([sys.executable, *command], cwd=tmp_path, env=environment()).check().output
    written = 1 if command == ["train.py"] else 2
    assert len(re.findall(r"main process: loss \d+\.\d+", said)) == 1
    assert {f"rank {rank} of {written}" for rank in range(written)} <= set(re.findall(r"rank \d of \d", said))
    assert len(list(checkpoint.glob("local-*.json"))) == written


@pytest.mark.gpu
def test_the_example_runs_on_accelerators(tmp_path: Path) -> None:
    checkpoint = train_script(tmp_path)
    run_command([sys.executable, "-m", "accel", "launch", "train.py"], cwd=tmp_path, env=environment({})).check()
    assert checkpoint.is_dir()


# Its commands need torch_xla; ``packages/accel/tests/test_xla_launch.py`` runs the script.
RUN_ELSEWHERE = {("docs/guides/xla.md", "xla_train.py")}


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_shows_is_used_by_a_command(page: str) -> None:
    blocks = commands_of(page)
    commands = "\n".join(block.text for block in blocks if block.file is None)
    files = {block.file for block in blocks if block.file and (page, block.file) not in RUN_ELSEWHERE}
    assert {file for file in files if not re.search(rf"\b{re.escape(Path(file).stem)}\b", commands)} == set()


def test_there_is_something_to_run() -> None:
    assert len(WITH_PYTHON) > 5
    assert "docs/get-started/first-script.md" in HERE
    assert {*ON_WHEELS} < {*WITH_COMMANDS}


MARKDOWN = sorted(
    str(path.relative_to(ROOT))
    for folder in (".", "docs", "examples", "packages", "testing", "benchmarks", "ci")
    for path in (ROOT.glob("*.md") if folder == "." else (ROOT / folder).rglob("*.md"))
)
GENERATED = paths()  # their anchors are checked by mkdocs
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def anchors_of(path: Path) -> set[str]:
    """The names of a page's headings, as renderers make them: lower case, hyphens for spaces, other signs dropped."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", MARKDOWN)
def test_links_lead_somewhere(page: str) -> None:
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    broken = []
    for found in LINK.finditer(text):
        target = found[1] or found[2]
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = ((ROOT / page).parent / name) if name else ROOT / page
        if os.path.relpath(path, ROOT / "docs") in GENERATED:
            continue
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors_of(path)):
            broken.append(target)
    assert not broken


def paths_in(nav: object) -> Iterator[str]:
    """The pages that a part of the site's navigation names."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from paths_in(part)


def test_the_site_has_every_page_and_fetches_nothing() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    folder = ROOT / "docs"
    written = [str(path.relative_to(folder)) for path in folder.rglob("*.md")]
    assert sorted(paths_in(site["nav"])) == sorted([*written, *GENERATED])
    assert site["strict"]
    assert site["theme"]["font"] is False
