"""Examples run on the default model, as their first lines say, with fewer tokens than a reader would take."""

from __future__ import annotations

import json
import re
import runpy
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rpe3d.geometry.registry import LAWS

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))

needs_default = pytest.mark.usefixtures("_converted")


@pytest.fixture(scope="module")
def _converted(default_cache):
    """The converted weights of the default model, or a skip without it."""
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(default_cache))
    yield
    patch.undo()


@pytest.fixture
def run(monkeypatch, capsys, one_thread):
    """Return what an example prints."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 40
    assert f"python examples/{path.name}" in source


@needs_default
def test_a_text_is_continued_under_a_law(run):
    said = run("extend_and_generate.py", "--tokens", 300)
    assert re.match(r"300 tokens under 3d-rpe {.*'reach': 4096.*}, on a model of 8192:\n\.\.\.", said)
    assert said.partition(" => ")[2].strip()


@needs_default
def test_laws_are_compared_and_agree_where_nothing_is_far(run):
    """3D-RPE and DCA are plain RoPE up to window + chunk and a chunk, and YaRN at the pretrained length is."""
    rows = re.findall(r"^(\S+) +([\d.]+) +[\d.]+ +[\d.]+$", run("compare_laws.py", "--length", 384), flags=re.M)
    assert {law for law, _ in rows} == {"rope", "yarn", "dca", "3d-rpe"}
    assert max(float(ppl) for _, ppl in rows) - min(float(ppl) for _, ppl in rows) <= 0.02


@needs_default
def test_a_law_of_one_s_own_runs(run, monkeypatch):
    """f = w + (d - w) / 2 with w = 64 is 5032 at a distance of 10,000."""
    monkeypatch.setitem(LAWS, "half", None)  # taken out again afterwards
    said = run("own_law.py")
    assert "is shown at 5032.0\n" in said
    assert said.splitlines()[1].strip()


@needs_default
@pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is missing: pip install '.[train]'")
def test_an_adapter_is_trained_and_generates(run, tmp_path):
    from pydoc_data.topics import topics

    data = tmp_path / "text.txt"
    data.write_text(topics["assignment"][:4000], encoding="utf-8")
    said = run("lora.py", data, "--out", tmp_path / "run", "--length", 64, "--steps", 2)
    assert (tmp_path / "run" / "adapter" / "rpe3d.json").is_file()
    assert "Once upon a time" in said.splitlines()[-1]


@needs_default
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; `make test-serve` has it")
def test_a_served_model_answers(run, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "25248" in run("serve_and_ask.py", "--port", port)


@needs_default
def test_the_notebook_runs_and_what_it_shows_is_still_so(capsys, monkeypatch, one_thread):
    """Its cells, one after the other; cells that do not depend on the number of tokens print what is stored."""
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is missing: pip install '.[cli]'")
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    names, compared = {}, 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        assert not [output for output in cell["outputs"] if output["output_type"] == "error"]
        exec(source.replace("TOKENS = 11776", "TOKENS = 300"), names)
        said = capsys.readouterr().out
        stored = "".join(line for output in cell["outputs"] for line in output.get("text", ()))
        if "TOKENS" not in source:
            assert said == stored
            compared += bool(stored)
    assert compared >= 3
