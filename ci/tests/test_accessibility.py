"""The check of the site takes every page and the system's browser, unless told otherwise."""

from pathlib import Path

import pytest

from ci.check_accessibility import browser_of, pages_of, parsed


def test_all_pages_are_checked_or_those_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no pages; build them"):
        pages_of(tmp_path, None)
    (tmp_path / "guides").mkdir()
    for name in ("index.html", "guides/data.html", "guides/data.md"):
        (tmp_path / name).touch()
    assert pages_of(tmp_path, None) == ["guides/data.html", "index.html"]
    assert pages_of(tmp_path, ["index.html"]) == ["index.html"]
    with pytest.raises(SystemExit, match=r"no page 'data\.html'"):
        pages_of(tmp_path, ["data.html"])


def test_the_browser_is_the_one_given_or_the_systems() -> None:
    installed = {"chromium-browser": "/usr/bin/chromium-browser"}
    assert browser_of("/opt/chrome", installed.get) == "/opt/chrome"
    assert browser_of(None, installed.get) == "/usr/bin/chromium-browser"
    assert browser_of(None, {}.get) is None


@pytest.mark.parametrize("option", ["--only-pictures", "--whole"])
def test_options_of_pictures_without_a_folder_for_them_are_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise nothing would be checked, and that would pass."""
    with pytest.raises(SystemExit, match="2"):
        parsed([option])
    assert f"{option} is about pictures; give --pictures DIR, too" in capsys.readouterr().err
    assert parsed([option, "--pictures", "here"]).pictures == Path("here")
