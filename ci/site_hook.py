"""Hook of mkdocs that adds the generated pages of ``ci/site_pages.py`` to the site."""

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
