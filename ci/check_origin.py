"""Fails unless every member of the workspace was installed from a path.

The packages are not on the public index, so a member resolved by name would be a stranger's code. pip writes
``direct_url.json`` only for installs from a path or URL.
"""

import json
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlparse

ROOT = Path(__file__).resolve().parents[1]


def members() -> list[str]:
    """Distribution names of the workspace, read from its pyproject files."""
    files = [*sorted(ROOT.glob("packages/*/pyproject.toml")), ROOT / "testing" / "pyproject.toml"]
    return [tomllib.loads(file.read_text())["project"]["name"] for file in files]


def complaint(name: str) -> str | None:
    """What is wrong with the origin of one installed distribution, or None."""
    try:
        text = distribution(name).read_text("direct_url.json")
    except PackageNotFoundError:
        return f"{name} is not installed"
    if text is None:
        return f"{name} was resolved by name from an index; install it by path"
    url = json.loads(text)["url"]
    if urlparse(url).scheme != "file":
        return f"{name} came from {url}; install it by path"
    return None


if __name__ == "__main__":
    wanted = sys.argv[1:] or members()
    complaints = [text for name in wanted if (text := complaint(name))]
    print("\n".join(complaints) or f"{len(wanted)} distributions come from a path")
    sys.exit(bool(complaints))
