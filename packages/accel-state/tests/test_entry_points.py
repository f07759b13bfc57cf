"""A name of an entry-point group is one object's, whichever packages are installed."""

import pytest

from accel_state.entry_points import find_entry_point
from accel_state.errors import BackendError

GROUP = "accel.examples"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Function that installs a distribution with one entry point."""

    def install(package, entry):
        facts = tmp_path / package / f"{package}-1.0.dist-info"
        facts.mkdir(parents=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text(f"[{GROUP}]\n{entry}\n")
        monkeypatch.syspath_prepend(tmp_path / package)

    return install


def test_a_name_is_found_by_being_installed(install):
    install("one", "fast = one:Fast")
    point = find_entry_point(GROUP, "fast", BackendError)
    assert point is not None
    assert point.value == "one:Fast"
    assert find_entry_point(GROUP, "slow", BackendError) is None


def test_a_name_that_two_packages_claim_is_refused_with_both(install):
    install("one", "fast = one:Fast")
    install("two", "fast = two:Fast")
    with pytest.raises(BackendError, match=r"'fast' .*uninstall all but one") as caught:
        find_entry_point(GROUP, "fast", BackendError)
    assert "one 1.0 (one:Fast)" in str(caught.value)
    assert "two 1.0 (two:Fast)" in str(caught.value)


def test_two_packages_may_name_the_same_object(install):
    install("one", "fast = one:Fast")
    install("two", "fast = one:Fast")
    point = find_entry_point(GROUP, "fast", BackendError)
    assert point is not None
    assert point.value == "one:Fast"
