"""Docstrings are for someone who meets one alone, in `help()` or a tooltip: a verb, a whole sentence, news.

ruff knows third persons and full stops (D205, D401, D404, D415 in pyproject.toml). It takes "What is left" and "θ_l in
force" for imperatives.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    ".",
    "analysis",
    "attention",
    "cli",
    "drawing",
    "evaluate",
    "geometry",
    "models",
    "rotation",
    "serve",
    "train",
)
"""Packages whose docstrings follow, `.` for the modules beside them."""
NOUNS = """
A All An Any As At Both By Each Every Everything Figure For From How If In Its It None Nothing On One Only Some That The
Their These This Those What Where Whether Which Who With Without
""".split()  # noqa: SIM905
"""Words that open a noun, or half a sentence that the function's name would have to finish."""
SMALL = {"a", "an", "the", "of", "in", "to", "and", "or", "for", "it", "its", "is", "with", "by", "return", "this"}


def functions(package):
    """Functions of a package that have a docstring; a property is a noun, and reads as one."""
    pattern = "*.py" if package == "." else f"{package}/**/*.py"
    for path in sorted((ROOT / "src" / "rpe3d").glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                marks = {getattr(mark, "id", None) for mark in node.decorator_list}
                if not marks & {"property", "cached_property"}:
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node.name, text


@pytest.mark.parametrize("package", PACKAGES)
def test_a_docstring_opens_with_a_verb(package):
    first = {place: text.split()[0].rstrip(",:.") for place, _, text in functions(package)}
    wrong = [place for place, word in first.items() if word in NOUNS or not re.fullmatch(r"[A-Z][a-z]+", word)]
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_docstring_says_more_than_the_name(package):
    def words(text):
        return {word.rstrip("s") for word in re.findall(r"[a-z\d]+", text.lower()) if word not in SMALL}

    wrong = [place for place, name, text in functions(package) if words(text) <= words(name.replace("_", " "))]
    assert wrong == []
