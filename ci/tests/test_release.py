"""A release has a wheel of each package, digests that verify, and its provenance."""

import json
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

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


def test_the_conda_package_has_every_package_and_what_they_need() -> None:
    recipe = yaml.safe_load((ROOT / "ci" / "conda" / "meta.yaml").read_text(encoding="utf-8"))
    tables = [
        tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in ROOT.glob("packages/*/pyproject.toml")
    ]
    assert set(recipe["test"]["imports"]) == {table["name"].replace("-", "_") for table in tables}
    needed = {Requirement(text).name for table in tables for text in table["dependencies"]}
    own = {table["name"] for table in tables}
    listed = {text.split()[0] for text in recipe["requirements"]["run"]}
    assert listed == {"python", *(name.replace("torch", "pytorch") for name in needed - own)}
