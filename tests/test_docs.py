"""What README.md and docs/ show can be run: code, the numbers beside it, commands and their flags, names."""

from __future__ import annotations

import ast
import csv
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import torch

import tiny_lm
from rpe3d.cli import VERBS, Parser
from rpe3d.geometry.registry import LAWS

ROOT = Path(__file__).parents[1]
OUTSIDE = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md"]
PAGES = [*(ROOT / name for name in OUTSIDE), *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(path.relative_to(ROOT)) for path in PAGES]
OTHERS = {"--fuzz"}  # pytest's, by tests/conftest.py
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def blocks(page, *languages):
    """The fenced blocks of a page in some languages; those without one are shell lines or a session."""
    parts = re.split(
        r"^```(.*)\n", page.read_text(encoding="utf-8"), flags=re.M
    )  # prose, fence, code, fence, prose ...
    assert len(parts) % 4 == 1, "a fence is not closed"
    return [code for fence, code in zip(parts[1::4], parts[2::4], strict=True) if fence in languages]


def shell_lines(page):
    lines = [line for block in blocks(page, "", "sh", "bash") for line in block.splitlines()]
    return [line for line in lines if not line.startswith((">>>", " "))]


def inline(page):
    """Code within a sentence, on one line."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", text)]


def parser_of(verb):
    parser = Parser(prog=f"rpe3d {verb}", allow_abbrev=False)
    import_module(VERBS[verb][0]).add_arguments(parser)
    return parser


@pytest.fixture
def laws_of_today():
    """A page may add a law; later tests do not see it."""
    before = dict(LAWS)
    yield
    LAWS.clear()
    LAWS.update(before)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_blocks_run_and_numbers_in_their_comments_are_right(page, tmp_path, monkeypatch, laws_of_today):
    """One namespace a page, as a reader would go through it; the hub's model is a tiny one."""
    tiny_lm.save(tmp_path / "model")
    (tmp_path / "document.txt").write_text("A document that is longer than the model was pretrained on. " * 6)
    monkeypatch.chdir(tmp_path)
    q, k = torch.randn(1, 4, 40, 64), torch.randn(1, 2, 40, 64)
    names = {"q": q, "k": k, "v": torch.randn_like(k)}
    for block in blocks(page, "python"):
        code = block.replace(HUB, str(tmp_path / "model"))
        for node in ast.parse(code).body:
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
            source = "\n".join(code.splitlines()[first - 1 : node.end_lineno])
            if not isinstance(node, ast.Expr):
                exec(source, names)
                continue
            value = eval(source, names)
            claim = re.search(r"#\s*(-?\d[\d_,]*(?:\.(\d+))?)(?![\w.])", code.splitlines()[node.end_lineno - 1])
            if claim:
                number = float(claim[1].replace(",", "").replace("_", ""))
                assert float(value) == pytest.approx(number, abs=0.5 * 10.0 ** -len(claim[2] or "")), source


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_sessions_say_what_they_show(page):
    """`>>> call` with the error that follows."""
    import rpe3d

    for block in blocks(page, ""):
        for call, shown in re.findall(r"^>>> (.*)\n((?:(?!>>>).+\n)*)", block, flags=re.M):
            try:
                said = f"{eval(call, {'rpe3d': rpe3d})}"
            except Exception as error:
                said = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
            assert said == shown.strip()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_shell_lines_are_commands_that_exist(page):
    """Parsed by the verb's own parser; `[--flag VALUE]` may be left out, `...` stands for more."""
    for line in shell_lines(page):
        command = re.sub(r"\s+#.*|[\[\]]", "", line)
        words = [word for word in shlex.split(command) if word != "..."]
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.M), line
        if "rpe3d" not in words or words[0] == "python" or words[:2] == ["pip", "install"]:
            continue
        verb, *rest = words[words.index("rpe3d") + 1 :]
        parser_of(verb).parse_args(rest)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_flags_in_sentences_exist(page):
    """Commands within a sentence may leave arguments out, so that only their flags are looked up."""
    for code in inline(page):
        flags = re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
        if found := re.match(r"rpe3d ([a-z]+)(?: |$)", code):
            known = parser_of(found[1])._option_string_actions
            assert not [flag for flag in flags if flag not in known], code
        elif found := re.match(r"python (benchmarks/\w+\.py)", code):
            source = "".join(path.read_text() for path in (ROOT / found[1], *ROOT.glob("benchmarks/*.py")))
            assert (ROOT / found[1]).exists(), code
            assert not [flag for flag in flags if f'"{flag}"' not in source], code
        elif flags and not re.match(r"(pip|pytest|accelerate|git|python|make|cargo|vllm) ", code):
            every = {flag for verb in VERBS for flag in parser_of(verb)._option_string_actions}
            assert code.split()[0] not in flags or flags[0] in every | OTHERS, code


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.csv")), ids=lambda path: path.name)
def test_every_number_of_a_result_names_its_commit(path):
    """A + is for files that differed from it; <= for the commit that brought a row without a stamp."""
    with path.open(newline="", encoding="utf-8") as file:
        commits = {row["commit"] for row in csv.DictReader(file)}
    assert commits
    assert not [name for name in commits if not re.fullmatch(r"[0-9a-f]{7}\+?|<=[0-9a-f]{7}", name)]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_names_in_sentences_exist(page):
    for code in inline(page):
        if found := re.fullmatch(r"(rpe3d(?:\.\w+)+)(?:\(.*\))?", code):
            parts = found[1].split(".")
            thing = import_module("rpe3d")
            for at, part in enumerate(parts[1:], 2):
                thing = getattr(thing, part) if hasattr(thing, part) else import_module(".".join(parts[:at]))
        for file, test in re.findall(r"(\w+/test_\w+\.py)(?:::(test_\w+))?", code):
            path = ROOT / "tests" / file if not file.startswith("tests/") else ROOT / file
            assert path.exists() or list((ROOT / "tests").rglob(Path(file).name)), code
            if test and path.exists():
                assert f"def {test}" in path.read_text(), code  # `..._` for several that begin so
        if found := re.match(r"make ([a-z-]+)$", code):
            assert re.search(rf"^{found[1]}:", (ROOT / "Makefile").read_text(), flags=re.M), code


def test_the_readme_is_one_screen_and_a_half():
    """A newcomer reads one page: what it is, that it works, how to install and use it, and what it costs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text) <= 6000
    assert "make demo" in text
    assert "make test" in text
