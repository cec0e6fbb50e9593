"""Every package that the sources import is declared in pyproject.toml, not only brought along by another one."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = {"huggingface_hub": "huggingface-hub"}
"""Modules whose distribution has another name."""
OPTIONAL = {"datasets", "prometheus_client", "triton"}
"""Modules that the sources do without: datasets serves one kind of --data, triton comes with torch for CUDA, and
prometheus_client with vLLM, in whose server alone it is used."""


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def test_every_package_that_is_imported_is_declared():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    users = [name for name in extras if name not in ("test", "docs", "dev")]  # not a user's
    lines = [*project["dependencies"], *(line for name in users for line in extras[name])]
    declared = {re.match(r"[\w-]+", line)[0] for line in lines}
    used = {
        name.partition(".")[0]: path.relative_to(ROOT)
        for path in sorted((ROOT / "src").rglob("*.py"))
        for name in imported(path)
    }
    foreign = {name: path for name, path in used.items() if name not in sys.stdlib_module_names and name != "rpe3d"}
    missing = {
        name: str(path)
        for name, path in foreign.items()
        if NAMES.get(name, name) not in declared and name not in OPTIONAL
    }
    assert missing == {}
