"""The command line: what goes where, what an error says, and that nothing is half written (DESIGN 3)."""

from __future__ import annotations

import csv
import errno
import json
import os
import struct
import subprocess
import sys
from argparse import ArgumentTypeError

import pytest

import rpe3d
from rpe3d.cli import VERBS, main
from rpe3d.cli.arguments import replacing, size
from rpe3d.config import ConfigError
from rpe3d.geometry import decay_bound

MODEL = {"pretrained": 8192, "context": 65536, "head_dim": 64, "rope_theta": 100000.0}


def fails(capsys, *argv):
    """The exit code and the two lines of an error, which leaves stdout empty."""
    code = main([str(word) for word in argv])
    captured = capsys.readouterr()
    assert captured.out == ""
    problem, hint = captured.err.splitlines()[-2:]  # a progress bar or a note may come before
    assert problem.startswith("error: ")
    assert hint.startswith("hint: ")
    return code, problem.removeprefix("error: "), hint.removeprefix("hint: ")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One run of the whole demo as a user has it, piped."""
    home = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "rpe3d", "demo", "--json", "laws.json"]
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, cwd=home, env=environment, capture_output=True, encoding="utf-8", timeout=120)
    assert result.returncode == 0, result.stderr
    return home, result


def test_the_table_goes_to_stdout_and_the_words_to_stderr(demo):
    _, result = demo
    assert [line for line in result.stderr.splitlines() if line.startswith("wrote ")] == [
        "wrote demo/decay.png, demo/decay.svg, demo/decay.csv, laws.json"
    ]
    assert "wrote" not in result.stdout
    assert "\x1b" not in result.stdout


def test_the_table_has_every_law_and_parameter_whole_at_80_columns(demo):
    _, result = demo
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert "…" not in result.stdout
    words = result.stdout.split()
    for name in rpe3d.laws():
        law = rpe3d.make_law(name, **MODEL)
        assert name in words
        for parameter in law.parameters():
            value = getattr(law, parameter)
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            assert f"{parameter}={shown}" in words


def test_the_json_gives_every_law_back(demo):
    home, _ = demo
    content = json.loads((home / "laws.json").read_text(encoding="utf-8"))
    assert content["schema"] == 1
    assert content["model"] == MODEL
    assert [row["law"] for row in content["rows"]] == list(rpe3d.laws())
    for row in content["rows"]:
        assert row["summary"] == rpe3d.laws()[row["law"]].description
        given_back = rpe3d.make_law(row["law"], **content["model"], **row["parameters"])
        assert given_back == rpe3d.make_law(row["law"], **MODEL)


def test_the_demo_writes_a_figure_its_numbers_and_nothing_else(demo):
    home, _ = demo
    assert sorted(path.name for path in home.iterdir()) == ["demo", "laws.json"]
    assert sorted(path.name for path in (home / "demo").iterdir()) == ["decay.csv", "decay.png", "decay.svg"]
    png = (home / "demo" / "decay.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert width >= 1600
    assert height >= 800
    assert len(png) > 50_000
    assert b"</svg>" in (home / "demo" / "decay.svg").read_bytes()


def test_the_csv_holds_what_the_laws_compute(demo):
    """Read back from the file alone: the setting of each row is enough to recompute it."""
    home, _ = demo
    with (home / "demo" / "decay.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["law"] for row in rows if row["setting"] == "model"} == {
        "rope", "linear", "dca", "self-extend", "rerope", "leaky-rerope", "3d-rpe"
    }  # fmt: skip
    for row in rows[::997]:
        setting = {name: int(row[name]) for name in ("pretrained", "context", "head_dim")}
        own = {"chunk": 1000} if row["law"] == "3d-rpe-definition" else {}
        law = rpe3d.make_law(row["law"], rope_theta=float(row["rope_theta"]), **setting, **own)
        last = law.context - 1
        key = last - int(row["distance"])
        assert float(row["bound"]) == pytest.approx(decay_bound(law, last, key).item(), rel=1e-9)
        if law.single_position:
            assert float(row["relative_position"]) == law.relative_position(last, key).item()
        else:
            assert row["relative_position"] == ""


def test_a_second_run_replaces_the_files(tmp_path, capsys):
    out, rows = tmp_path / "out", tmp_path / "rows.json"
    out.mkdir()
    (out / "decay.csv").write_text("old")
    (out / "mine.txt").write_text("kept")
    rows.write_text("old")
    arguments = ["demo", "--out", str(out), "--json", str(rows), "--pretrained", "1k", "--context", "2K"]
    assert main(arguments) == 0
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main(arguments) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first
    assert sorted(first) == ["decay.csv", "decay.png", "decay.svg", "mine.txt"]
    assert first["mine.txt"] == b"kept"
    assert json.loads(rows.read_text())["model"]["context"] == 2048


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["demo", "--help"], ["dmo"], ["demo", "--context", "8q"], []]
)
def test_help_and_usage_errors_do_not_load_torch(argv):
    """STYLE: a verb loads torch only when it runs."""
    script = (
        "import sys\nfrom rpe3d.cli import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as stop:\n    code = stop.code or 0\n"
        "heavy = {'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "print(code, sorted(heavy), file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", script, *argv], env=environment, capture_output=True, text=True)
    asked = "--help" in argv or "--version" in argv
    assert result.stderr.splitlines()[-1] == f"{0 if asked else 2} []"
    assert bool(result.stdout) == asked


def test_help_lists_every_verb_and_version_is_the_package_version(capsys):
    for argv, words in ((["--help"], list(VERBS)), (["--version"], [rpe3d.__version__])):
        with pytest.raises(SystemExit, match="0"):
            main(argv)
        out = capsys.readouterr().out.split()
        assert all(word in out for word in words)


@pytest.mark.parametrize(
    ("argv", "problem", "hint"),
    [
        ([], "a verb is missing", "rpe3d --help"),
        (["dmo"], "verb 'dmo' is not known", "did you mean 'demo'?"),
        (["--loud", "demo"], "--loud", "rpe3d --help"),
        (["demo", "--loud"], "--loud", "rpe3d demo --help"),
        (["demo", "--context"], "--context", "rpe3d demo --help"),
        (["demo", "--context", "64q"], "'64q' is not a size", "rpe3d demo --help"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(capsys, argv, problem, hint):
    code, said, hinted = fails(capsys, *argv)
    assert code == 2
    assert problem in said
    assert hint in hinted


def test_a_rule_that_a_parameter_breaks_exits_with_1(capsys, tmp_path):
    code, problem, hint = fails(capsys, "demo", "--context", "4k", "--out", tmp_path / "out")
    assert (code, problem) == (1, "context is 4096, below the pretrained length 8192")
    assert hint == "raise context, or use the model as it is"
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_is_one_clear_error(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    assert fails(capsys, "demo", "--out", file) == (1, f"{file} is a file, not a folder", "give --out a folder")
    code, problem, _ = fails(capsys, "demo", "--out", file / "below")
    assert (code, problem) == (1, f"cannot make the folder {file / 'below'}: Not a directory")
    assert file.read_text() == "kept"


def test_a_folder_that_cannot_be_written_to_is_one_clear_error(capsys, monkeypatch, tmp_path):
    """Root may write anywhere, so the refusal is played."""

    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "replace", refuse)
    code, problem, hint = fails(capsys, "demo", "--out", tmp_path)
    assert (code, problem) == (1, f"cannot write {tmp_path / 'decay.png'}: Permission denied")
    assert hint == "give --out a place to write to"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["rich", "matplotlib"])
def test_a_missing_extra_says_how_to_install_it(capsys, monkeypatch, tmp_path, module):
    monkeypatch.setitem(sys.modules, module, None)
    expected = (1, f"{module} is not installed", "pip install 'rpe3d[cli]'")
    assert fails(capsys, "demo", "--out", tmp_path / "out") == expected
    assert not (tmp_path / "out").exists()


def test_an_interrupt_is_one_line_and_130(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rpe3d.cli.demo.run", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_reader_that_leaves_gets_no_stack_trace(tmp_path):
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "rpe3d", "demo", "--out", str(tmp_path)]
    result = subprocess.run(command, env=environment, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


@pytest.mark.parametrize(
    ("text", "value"), [("65536", 65536), ("8k", 8192), ("64K", 65536), (" 1M ", 1048576), ("0", 0)]
)
def test_a_size_counts_k_as_1024(text, value):
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "k", "8q", "-8", "1.5k", "8 k", "8kk", "1_000", "٣", "9" * 5000])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="is not a size"):
        size(text)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing("--json", path) as unfinished:
        unfinished.write_text("half \ud800", encoding="utf-8")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "old")]
    with replacing("--json", path) as unfinished:
        unfinished.write_text("new")
        assert path.read_text() == "old"
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "new")]


def test_a_link_is_written_through(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    with replacing("--json", link) as unfinished:
        unfinished.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "not a regular file"),
        ("none/file", "No such file"),
        ("file/below", "Not a directory"),
        ("x" * 300, "too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_with_its_name(tmp_path, name, problem):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=problem) as caught, replacing("--json", tmp_path / name) as unfinished:
        unfinished.write_text("new")
    assert str(tmp_path / name) in caught.value.problem
    assert "--json" in caught.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_doctor_says_what_runs_under_every_law(capsys, tmp_path):
    """Every choice that impl="auto" makes is reported, with the reason."""
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert report["schema"] == 1
    assert report["machine"]["torch"] in captured.out
    on_cpu = {row["law"]: row for row in report["rows"] if row["device"] == "cpu"}
    assert set(on_cpu) == set(rpe3d.laws())
    assert {row["prefill"] for row in on_cpu.values()} == {"blocked (cpu)"}
    assert {row["rotation"] for row in on_cpu.values()} == {"reference"}
    assert all(row["decode_reason"] for row in on_cpu.values())


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "model"
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=64, **sizes)).save_pretrained(folder)
    return folder


def test_extend_writes_a_checkpoint_that_carries_its_law(tiny_folder, tmp_path, capsys):
    out = tmp_path / "long"
    chosen = ["--chunk", "8", "--window", "16", "--set", "reach=32"]
    assert main(["extend", str(tiny_folder), "--context", "1k", "--out", str(out), *chosen]) == 0
    assert capsys.readouterr().out == ""
    config = json.loads((out / "config.json").read_text())
    law = config["rope_parameters"]["law"]
    assert (law["name"], law["context"], law["chunk"], law["window"], law["reach"]) == ("3d-rpe", 1024, 8, 16, 32)
    assert config["max_position_embeddings"] == 1024
    assert [path.name for path in tmp_path.iterdir()] == ["long"]


def test_extend_overwrites_nothing_and_leaves_nothing_half_written(tiny_folder, tmp_path, capsys):
    out = tmp_path / "long"
    out.mkdir()
    (out / "mine").write_text("mine")
    assert fails(capsys, "extend", tiny_folder, "--context", "1k", "--out", out)[0] == 1
    assert (out / "mine").read_text() == "mine"
    code, problem, _ = fails(capsys, "extend", tiny_folder, "--context", "32", "--out", tmp_path / "new")
    assert (code, problem) == (1, "context is 32, below the pretrained length 64")
    code, problem, _ = fails(capsys, "extend", tmp_path / "nowhere", "--context", "1k", "--out", tmp_path / "new")
    assert code == 1
    assert not (tmp_path / "new").exists()


def test_doctor_says_what_a_law_would_change_in_a_model(tiny_folder, capsys):
    assert main(["doctor", str(tiny_folder)]) == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM" in shown
    assert "1 of 1" in shown
    assert "none: stock" in shown
