"""Pickling by value: code keeps its file name, in nested functions and classes too."""

from typing import Any

from accel_launch.notebook.pickle_by_value import dumps, loads

_CELL = """
def outer():
    def inner():
        return 1
    return inner

class Thing:
    def method(self):
        return outer()()
"""


def test_code_keeps_its_file_name() -> None:
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(_CELL, "<cell 7>", "exec"), cell)
    outer, thing = loads(dumps((cell["outer"], cell["Thing"])))
    assert outer is not cell["outer"]
    assert outer.__code__.co_filename == "<cell 7>"
    assert outer().__code__.co_filename == "<cell 7>"
    assert thing.method.__code__.co_filename == "<cell 7>"
    assert thing().method() == 1
