"""A release has a wheel of each package, digests that verify, its provenance and a signature."""

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import accel
from ci.check_wheels import projects
from ci.release import NAMESPACE, ROOT, digests, git, release, sha256, sign


@pytest.mark.slow
def test_a_release_can_be_verified_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")  # release sets it; the fixture restores it
    wheels = release(tmp_path / "dist", check=False)
    assert {wheel.name.split("-")[0] for wheel in wheels} == {name.replace("-", "_") for name in projects()}
    verify = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    subprocess.run(verify, cwd=tmp_path / "dist", check=True)
    stated = json.loads((tmp_path / "dist" / "provenance.json").read_text(encoding="utf-8"))
    source, *_ = stated["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source["digest"] == {"gitCommit": git("rev-parse", "HEAD")}
    named = {subject["name"]: subject["digest"]["sha256"] for subject in stated["subject"]}
    assert named == {wheel.name: sha256(wheel) for wheel in wheels}
    again = release(tmp_path / "again", check=False)
    assert digests(again) == digests(wheels)
    wheels[0].write_bytes(wheels[0].read_bytes() + b"\0")
    assert subprocess.run(verify, cwd=tmp_path / "dist", capture_output=True).returncode != 0


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)
    return path


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")
def test_a_signature_verifies_for_what_was_signed_with_the_key_of_releases_alone(tmp_path: Path, key: Path) -> None:
    sums, signers = tmp_path / "SHA256SUMS", tmp_path / "signers"
    sums.write_text("0  a.whl\n")
    signature = sign(sums, key)
    signers.write_text(f"releases {key.with_suffix('.pub').read_text()}")

    def verifies(content: bytes, namespace: str = NAMESPACE) -> bool:
        command = ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", "releases", "-n", namespace, "-s", signature]
        return subprocess.run(command, input=content, capture_output=True).returncode == 0

    assert verifies(sums.read_bytes())
    assert not verifies(b"1  a.whl\n")
    assert not verifies(sums.read_bytes(), "git")
    signers.write_text("releases ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n")
    assert not verifies(sums.read_bytes())


def test_a_release_without_its_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no key at .*missing; expected a private SSH key"):
        release(tmp_path / "dist", key=tmp_path / "missing")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")
def test_a_work_tree_that_its_commit_does_not_describe_is_not_signed(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ci.release.changed", lambda: True)
    with pytest.raises(SystemExit, match="uncommitted changes"):
        release(tmp_path / "dist", key=key)


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
