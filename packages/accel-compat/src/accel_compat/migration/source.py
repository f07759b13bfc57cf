"""Source of a script: its text, its syntax tree, and positions in both."""

import ast
import io
import os
import shutil
import tempfile
import tokenize
from pathlib import Path
from typing import final

from accel_state.errors import ConfigError


@final
class ScriptSource:
    """A script that was read, not imported.

    Attributes:
        path: its file.
        utf8: its text in UTF-8, in which syntax trees count columns.
        tree: its syntax tree.

    Raises:
        ConfigError: the file cannot be read, or is no Python.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            raw = path.read_bytes()
            self._encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            text = raw.decode(self._encoding)
            self.tree = ast.parse(text, str(path))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (SyntaxError, ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            place = f"{path}:{line}" if line else str(path)
            raise ConfigError(f"{place} is no Python of version 3: {getattr(error, 'msg', error)}") from error
        self.utf8 = text.encode()
        self._starts = [0]
        for line in self.utf8.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt | ast.alias) -> int:
        """Byte at which a node begins."""
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.alias) -> int:
        """Byte behind a node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def text_of(self, node: ast.expr | ast.stmt | ast.alias) -> str:
        """Text of a node."""
        return self.utf8[self.start(node) : self.end(node)].decode()

    def line_start(self, node: ast.stmt) -> int:
        """Byte at which the line of a statement begins."""
        return self._starts[node.lineno - 1]

    def line_end(self, node: ast.stmt) -> int:
        """Byte behind the line in which a statement ends, its newline included."""
        assert node.end_lineno is not None
        return self._starts[min(node.end_lineno, len(self._starts) - 1)]

    def place(self, node: ast.expr | ast.stmt | ast.alias) -> tuple[int, int]:
        """Line and column of a node, both from 1, in characters."""
        begin = self._starts[node.lineno - 1]
        return node.lineno, len(self.utf8[begin : begin + node.col_offset].decode()) + 1

    def write(self, utf8: bytes) -> None:
        """Replaces the file's text, in full or not at all; its encoding and its mode stay, and a link stays a link."""
        target = self.path.resolve()
        with open(target, "r+b"):  # which a read-only file refuses, and a rename does not
            pass
        handle, staged = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(handle, "wb") as file:
                file.write(utf8.decode().encode(self._encoding))
            shutil.copymode(target, staged)
            os.replace(staged, target)
        except BaseException:
            os.unlink(staged)
            raise
