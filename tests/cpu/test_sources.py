"""A figure outlives a change of words, and no change of code."""

import pytest

from fa_a2a.bench.sources import code_of

BEFORE = '''"""Module."""

import math  # of course


class A:
    """Class."""

    def area(self, radius):
        """Area."""
        # a circle
        name = "# not a comment"  # but this is
        return math.pi * radius**2, name, """not
        a docstring"""
'''
WORDS = BEFORE.replace("Area.", "Area,\n\n        in square units").replace("# a circle", "#  of a disc\n\n")
WORDS = WORDS.replace("Module.", "Another").replace("# of course", "# needed")


@pytest.fixture
def code(tmp_path):
    def of(text, name="x.py"):
        (tmp_path / name).write_text(text)
        return code_of(tmp_path / name)

    return of


def test_words_do_not_count(code):
    assert WORDS != BEFORE and code(WORDS) == code(BEFORE)
    assert b"of course" not in code(BEFORE) and b"Area" not in code(BEFORE)


@pytest.mark.parametrize(
    ("old", "new"),
    [("radius**2", "radius**3"), ("# not a", "# no"), ("not\n", "no\n"), ("class A", "class B"), ("import math", "")],
)
def test_code_counts(code, old, new):
    assert old in BEFORE and code(BEFORE.replace(old, new)) != code(BEFORE)


def test_other_files_count_whole(code):
    assert code("int x; // a\n", "x.cuh") != code("int x; // b\n", "x.cuh")
