"""The command line: what goes where, what an error says, and that nothing is half written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentTypeError

import pytest
import torch

import rpe3d
from rpe3d.cli import VERBS, main
from rpe3d.cli.arguments import replacing, size
from rpe3d.cli.terminal import times
from rpe3d.config import ConfigError
from rpe3d.models.failures import explained


def fails(capsys, *argv):
    """The exit code and the two lines of an error, which leaves stdout empty."""
    code = main([str(word) for word in argv])
    captured = capsys.readouterr()
    assert captured.out == ""
    problem, hint = captured.err.splitlines()[-2:]  # a progress bar or a note may come before
    assert problem.startswith("error: ")
    assert hint.startswith("hint: ")
    return code, problem.removeprefix("error: "), hint.removeprefix("hint: ")


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["--version"], ["demo", "--help"], ["train", "--help"], ["dmo"], ["demo", "--length", "8q"], []],
)
def test_help_and_usage_errors_do_not_load_torch(argv):
    """A verb loads torch only when it runs."""
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
        (["demo", "--length"], "--length", "rpe3d demo --help"),
        (["demo", "--length", "64q"], "'64q' is not a size", "rpe3d demo --help"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(capsys, argv, problem, hint):
    code, said, hinted = fails(capsys, *argv)
    assert code == 2
    assert problem in said
    assert hint in hinted


def test_a_folder_that_cannot_be_is_one_clear_error(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    assert fails(capsys, "demo", "--out", file) == (1, f"{file} is a file, not a folder", "pass a folder to --out")
    code, problem, _ = fails(capsys, "demo", "--out", file / "below")
    assert (code, problem) == (1, f"cannot create the folder {file / 'below'}: Not a directory")
    assert file.read_text() == "kept"


def test_an_interrupt_is_one_line_and_130(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rpe3d.cli.demo.run", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_reader_that_leaves_gets_no_stack_trace():
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "rpe3d", "doctor"]
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


@pytest.mark.parametrize("text", ["1000m", "17m", "16777217", "999999999999m"])
def test_a_length_at_which_float32_loses_positions_is_refused(capsys, tmp_path, text):
    """transformers computes angles from float32 positions: at 2^24 neighbours get the same one."""
    assert torch.tensor(2**24).float() == torch.tensor(2**24 + 1).float()
    assert size("16m") == 2**24
    code, problem, _ = fails(capsys, "extend", "m", "--context", text, "--out", tmp_path / "out")
    assert code == 2
    assert f"'{text}' is more than 16m tokens" in problem


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
    for reason in {row["decode_reason"] for row in report["rows"]}:
        assert captured.out.count(reason) == 1
    assert f"all {len(on_cpu)}" in captured.out


@pytest.mark.parametrize(
    ("passed", "left", "shown"),
    [(181, 7.4, "0:03:01, 0:00:07 left"), (181, None, "0:03:01"), (3725.6, 0.0, "1:02:06"), (None, None, "0:00:00")],
)
def test_the_bar_says_what_has_passed_and_what_is_left(passed, left, shown):
    """`0:03:01 left 0:00:00` was read as three minutes left."""
    assert times(passed, left) == shown


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


def test_a_model_whose_config_cannot_hold_a_law_is_refused_before_anything_is_written(tmp_path, capsys):
    """Phi-3's config takes no rope type but its own; in memory it runs under any law."""
    from transformers import Phi3Config, Phi3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Phi3Config(vocab_size=50, max_position_embeddings=64, pad_token_id=0, **sizes)
    Phi3ForCausalLM(config).save_pretrained(tmp_path / "phi3")
    code, problem, hint = fails(capsys, "extend", tmp_path / "phi3", "--context", "1k", "--out", tmp_path / "new")
    assert code == 1
    assert "runs under a law but cannot be saved with it" in problem
    assert "extend it wherever it is loaded" in hint
    assert [path.name for path in tmp_path.iterdir()] == ["phi3"]
    assert main(["doctor", str(tmp_path / "phi3")]) == 0
    assert "cannot be saved" in capsys.readouterr().out


def test_doctor_says_what_a_law_would_change_in_a_model(tiny_folder, capsys):
    assert main(["doctor", str(tiny_folder)]) == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM" in shown
    assert "1 of 1" in shown
    assert "none: stock" in shown


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"])
def test_doctor_names_a_weight_that_is_not_a_finite_number(tiny_folder, tmp_path, capsys, name):
    """One NaN in a query was read as a family that turns other dimensions; one in the head was not seen at all."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_folder, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights[name][3, 2] = float("nan")
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    assert main(["doctor", str(tmp_path / "model")]) == 1
    shown = capsys.readouterr().out
    assert f"its weights are not finite: {name} holds NaN or infinity (1 of its numbers)" in shown
    assert "other dimensions" not in shown


def test_extend_names_a_weight_that_is_not_a_finite_number(tiny_folder, tmp_path, capsys):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_folder)
    model.model.embed_tokens.weight.data[1, 0] = float("inf")
    model.save_pretrained(tmp_path / "model")
    code, problem, hint = fails(capsys, "extend", tmp_path / "model", "--context", "1k", "--out", tmp_path / "out")
    assert code == 1
    assert "are not finite: model.embed_tokens.weight holds NaN or infinity (1 of its numbers)" in problem
    assert "copy or convert the weights again" in hint
    assert not (tmp_path / "out").exists()


def test_doctor_exits_with_1_for_a_model_that_cannot_be_extended(tmp_path, capsys):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path)]) == 1
    assert "not supported" in capsys.readouterr().out


def test_an_interrupt_during_an_import_waits_for_its_end(capsys, monkeypatch, tmp_path):
    """transformers turns one inside an import into a ModuleNotFoundError, which read "copy it again"."""
    lines = ["import os, signal", "try:", "    os.kill(os.getpid(), signal.SIGINT)", "    done = sum(range(10**5))"]
    lines += ["except KeyboardInterrupt as error:", "    raise ModuleNotFoundError from error"]
    (tmp_path / "interrupted_module.py").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)

    def imports(*_):
        import interrupted_module

        assert interrupted_module.done
        time.sleep(10)

    monkeypatch.setattr("rpe3d.cli.demo.run", imports)
    before = signal.getsignal(signal.SIGINT)
    assert main(["demo"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_a_library_disguises_is_still_one():
    def load():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ModuleNotFoundError("Could not import module 'LlamaConfig'") from error

    with pytest.raises(KeyboardInterrupt), explained("model"):
        load()
