"""What of a source file can change a figure: its code, without comments and docstrings."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path


def code_of(file: Path) -> bytes:
    """The code of a Python file, line by line, without comments, docstrings, blank lines and trailing space; any other
    file as it is. The same under every version of Python that can parse the file."""
    if file.suffix != ".py":
        return file.read_bytes()
    text = file.read_text()
    lines: list[str] = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            lines[docstring.lineno - 1 : docstring.end_lineno] = [""] * (docstring.end_lineno - docstring.lineno + 1)
    return "\n".join(line for line in map(str.rstrip, lines) if line).encode()
