"""Hooks of mkdocs: generated pages of ``ci/site_pages.py``, names of docstrings, and the name of the search dialog."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent))

import site_pages


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages before mkdocs reads the navigation."""
    for path, text in site_pages.pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Shows names in docstrings as code, by their last part."""
    return site_pages.without_roles(html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Names the search dialog for screen readers."""
    return named(output)


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """The same for the page that a server shows where there is none."""
    return named(output)


def named(html: str) -> str:
    """A page whose search dialog has a name."""
    return html.replace('role="dialog"', 'role="dialog" aria-label="Search"')
