"""Distributions of the workspace."""

from packaging.requirements import Requirement

from ci.check_wheels import projects


def test_all_distributions_have_one_prefix_and_none_is_named_accel() -> None:
    names = set(projects())
    assert all(name.startswith("accel-") for name in names)  # ``accel`` on the public index is another project
    needed = {Requirement(text).name for _, table in projects().values() for text in table["dependencies"]}  # type: ignore[attr-defined]
    assert {name for name in needed if name.startswith("accel") and name != "accelerate"} <= names
