"""A release has a wheel of each package, digests that verify, and its provenance."""

import json
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import accel
from ci.check_wheels import projects
from ci.release import ROOT, digests, git, release


@pytest.mark.slow
def test_a_release_can_be_verified_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")  # release sets it; the fixture restores it
    wheels = release(tmp_path / "dist", check=False)
    assert {wheel.name.split("-")[0] for wheel in wheels} == {name.replace("-", "_") for name in projects()}
    verify = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    subprocess.run(verify, cwd=tmp_path / "dist", check=True)
    facts = json.loads((tmp_path / "dist" / "provenance.json").read_text(encoding="utf-8"))
    assert facts["commit"] == git("rev-parse", "HEAD")
    again = release(tmp_path / "again", check=False)
    assert digests(again) == digests(wheels)
    wheels[0].write_bytes(wheels[0].read_bytes() + b"\0")
    assert subprocess.run(verify, cwd=tmp_path / "dist", capture_output=True).returncode != 0


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.whl").touch()
    with pytest.raises(SystemExit, match="new or empty folder"):
        release(tmp_path)


CONDA_NAMES = {"torch": "pytorch", "zlib-ng": "python-zlib-ng"}
"""conda-forge's names of what the public index names differently."""


def test_the_conda_package_has_every_package_and_what_they_need() -> None:
    recipe = yaml.safe_load((ROOT / "ci" / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    tables = [
        tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in ROOT.glob("packages/*/pyproject.toml")
    ]
    own = {table["name"] for table in tables}
    sources = {path.parent.name for path in ROOT.glob("packages/*/src/*/__init__.py")}
    assert set(recipe["tests"][0]["python"]["imports"]) == sources
    assert recipe["package"]["name"] in own
    needed = {f"python {table['requires-python']}" for table in tables}
    for requirement in (Requirement(text) for table in tables for text in table["dependencies"]):
        if requirement.name not in own:
            needed.add(f"{CONDA_NAMES.get(requirement.name, requirement.name)} {requirement.specifier}")
    assert sorted(recipe["requirements"]["run"]) == sorted(needed)
    scripts = [f"{name} = {target}" for table in tables for name, target in table.get("scripts", {}).items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
    assert recipe["package"]["version"] == accel.__version__


def test_the_image_copies_what_the_ignore_file_leaves() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split() if line.startswith("!")}
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {line.split()[1].split("/")[0] for line in lines if line.startswith("COPY ") and "--from" not in line}
    assert copied == sent
    assert all((ROOT / folder).is_dir() for folder in copied)
