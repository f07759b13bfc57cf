"""Prose is cut into the sentences and docstrings that check_prose.py judges."""

from pathlib import Path

from ci.check_prose import ROLE, docstrings, sentences

PAGE = """# A heading that is no sentence

One sentence. Another one: with `code that has many words in it` and a [link](somewhere.md)!

- an item
- another item

| a | table |
| --- | --- |

```python
code = "is no sentence"
```
"""


def test_sentences_leave_out_code_tables_and_headings() -> None:
    assert list(sentences(PAGE)) == [
        "One sentence.",
        "Another one:",
        "with code and a link!",
        "- an item",
        "- another item",
    ]


def test_docstrings_have_names_and_lines(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Module."""\n\n\nclass A:\n    """Class."""\n\n    def f(self):\n        """Method."""\n')
    assert list(docstrings(module)) == [(1, "module", "Module."), (4, "A", "Class."), (7, "f", "Method.")]


def test_roles_of_sphinx_are_found_and_plain_code_is_not() -> None:
    assert [ROLE.search(text) is not None for text in ("see :func:`f`.", "see ``f``.", "key: `value`")] == [
        True,
        False,
        False,
    ]
