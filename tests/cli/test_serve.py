"""`rpe3d serve`: what it tells vLLM, and what it refuses before vLLM starts. None of it needs vLLM."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from importlib.metadata import PackageNotFoundError
from threading import Thread
from types import SimpleNamespace

import pytest
from refusal import refusal

import rpe3d
import tiny_lm
from rpe3d.cli import main
from rpe3d.cli import serve as verb
from rpe3d.models.load import load
from rpe3d.serve import launch, refusals, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    made = tmp_path_factory.mktemp("extended")
    rpe3d.extend(tiny_lm.model(), "dca", context=1024).save_pretrained(made)
    return made


@pytest.fixture
def installed(monkeypatch):
    """A vLLM that is there, with our plugin."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(launch, "version", lambda _: "0.32.0")
    monkeypatch.setattr(launch, "entry_points", lambda group: [SimpleNamespace(name="rpe3d")])


class Process:
    """A server that says it is ready, or has ended with `code`. Whoever waits for it presses Ctrl-C at once."""

    def __init__(self, line, code=None):
        self.line, self.returncode = line, code

    def poll(self):
        return self.returncode

    def terminate(self):
        self.returncode = 0

    def wait(self, timeout=None):
        if self.returncode is None:
            raise KeyboardInterrupt
        return self.returncode


@pytest.fixture
def started(installed, monkeypatch):
    """The processes that the verb started; every one answers at once."""
    made = []

    def popen(line, **_):
        made.append(Process(line))
        return made[-1]

    monkeypatch.setattr(verb.subprocess, "Popen", popen)
    monkeypatch.setattr(launch, "wait_until_ready", lambda *_: None)
    return made


def test_a_server_that_ends_by_itself_is_an_error(folder, started, monkeypatch, capsys):
    """vLLM's exit code is 0 also where its engine was killed, so the code alone says nothing."""
    monkeypatch.setattr(Process, "wait", lambda self, timeout=None: self.terminate() or 0)
    assert main(["serve", str(folder), "--context", "1k", "--port", "0"]) != 0
    assert "error: vLLM exited by itself (exit code 0)" in capsys.readouterr().err


def test_the_server_is_told_its_law_for_the_metrics(folder, installed, monkeypatch):
    seen = []

    def popen(line, env, **_):
        seen.append(json.loads(env["RPE3D_SERVED_LAW"]))
        return Process(line)

    monkeypatch.setattr(verb.subprocess, "Popen", popen)
    monkeypatch.setattr(launch, "wait_until_ready", lambda *_: None)
    assert main(["serve", str(folder), "--context", "1k", "--law", "dca", "--port", "0"]) == 0
    assert (seen[0]["law"], seen[0]["context"]) == ("dca", "1024")
    assert all(isinstance(value, str) for value in seen[0].values())


def option(line, name):
    return line[line.index(name) + 1]


def test_a_stock_model_gets_its_law_by_overrides(folder, started, capsys):
    """The very entry that `extend` writes, found without the weights."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    argv = ["serve", str(folder), "--context", "1k", "--chunk", "8", "--port", str(port), "--vllm", "max-num-seqs=8"]
    assert main(argv) == 0
    (process,) = started
    written = rpe3d.extend(tiny_lm.model(), context=1024, chunk=8).config
    overrides = json.loads(option(process.line, "--hf-overrides"))
    assert overrides == {"rope_parameters": written.rope_parameters, "max_position_embeddings": 1024}
    assert option(process.line, "--max-model-len") == "1024"
    assert option(process.line, "--model") == str(folder)
    assert process.line[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert "--max-num-seqs=8" in process.line
    said = capsys.readouterr()
    assert said.out == f"http://127.0.0.1:{port}/v1\n"
    assert f"curl http://127.0.0.1:{port}/v1/completions" in said.err


def test_a_longchat_is_served_with_the_positions_that_it_was_trained_with(started, capsys, tmp_path):
    """`rope_condense_ratio`, which vLLM does not read, reaches it as a scaling under the law."""
    model = tiny_lm.model()
    model.config.rope_condense_ratio = 8
    model.save_pretrained(tmp_path)
    assert main(["serve", str(tmp_path), "--context", "1k", "--port", "0"]) == 0
    written = rpe3d.extend(load(str(tmp_path), device="cpu", with_tokenizer=False).model, context=1024).config
    overrides = json.loads(option(started[0].line, "--hf-overrides"))
    assert overrides["rope_parameters"] == written.rope_parameters
    assert overrides["rope_parameters"]["law"]["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert "note: its positions are divided by 8" in capsys.readouterr().err


def test_a_law_is_text_or_a_file_as_for_extend(folder, started, tmp_path):
    """A file brings its own context, as in `rpe3d.extend`; --context and --chunk beat it."""
    made = rpe3d.law_of(rpe3d.extend(tiny_lm.model(), "dca:chunk=96,window=128", context=1024))
    path = tmp_path / "law.json"
    path.write_text(json.dumps(made.to_dict()))
    assert main(["serve", str(folder), "--law", "dca:chunk=96,window=128", "--context", "1k", "--port", "0"]) == 0
    assert main(["serve", str(folder), "--law", str(path), "--port", "0"]) == 0
    assert main(["serve", str(folder), "--law", str(path), "--context", "2k", "--chunk", "64", "--port", "0"]) == 0
    laws = [json.loads(option(process.line, "--hf-overrides"))["rope_parameters"]["law"] for process in started]
    assert laws[0] == laws[1] == made.to_dict()
    assert (laws[2]["chunk"], laws[2]["window"], laws[2]["context"]) == (64, 128, 2048)
    assert [option(process.line, "--max-model-len") for process in started] == ["1024", "1024", "2048"]


def test_an_extended_checkpoint_needs_no_flags(extended, started):
    assert main(["serve", str(extended), "--port", "0"]) == 0
    assert "--hf-overrides" not in started[0].line
    assert option(started[0].line, "--max-model-len") == "1024"


def test_laws_that_do_not_fit_are_refused(folder, extended, installed, capsys, tmp_path):
    assert refusal(capsys, "serve", folder)[:2] == (1, f"{folder} carries no law")
    assert "already carries a law (dca, 1024 tokens)" in refusal(capsys, "serve", extended, "--context", "2k")[1]
    assert "dynamic changes its" in refusal(capsys, "serve", folder, "--context", "1k", "--law", "dynamic")[1]
    assert "above half" in refusal(capsys, "serve", folder, "--context", "1k", "--chunk", "200")[1]
    other = rpe3d.make_law("3d-rpe", pretrained=64, context=1024, head_dim=16)
    path = tmp_path / "law.json"
    path.write_text(json.dumps(other.to_dict()))
    assert (
        "was made for a model of 64 positions" in refusal(capsys, "serve", folder, "--context", "1k", "--law", path)[1]
    )


def test_a_family_that_is_not_tested_is_refused(installed, capsys, tmp_path):
    from transformers import GraniteConfig

    GraniteConfig(hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path)
    assert "type 'granite'" in refusal(capsys, "serve", tmp_path, "--context", "1k")[1]


def test_a_model_that_is_not_there_is_refused(installed, capsys, tmp_path):
    assert refusal(capsys, "serve", tmp_path / "none", "--context", "1k")[0] == 1


def test_a_port_that_is_taken_is_refused(extended, installed, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, problem, _ = refusal(capsys, "serve", extended, "--port", port)
    assert (code, problem) == (1, f"cannot listen on 127.0.0.1:{port}: Address already in use")


def test_a_vllm_that_is_missing_other_or_blind_is_refused(extended, installed, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "VLLM_PLUGINS is 'other'" in refusal(capsys, "serve", extended)[1]
    monkeypatch.setattr(launch, "entry_points", lambda group: [])
    assert refusal(capsys, "serve", extended)[1] == "vLLM cannot find the plugin of rpe3d"
    monkeypatch.setattr(launch, "version", lambda _: "0.33.0")
    assert "vLLM is 0.33.0" in refusal(capsys, "serve", extended)[1]

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(launch, "version", missing)
    code, problem, hint = refusal(capsys, "serve", extended)
    assert (code, problem) == (1, "vllm is not installed")
    assert "rpe3d[serve]" in hint


MEMORY = "Free memory on device cuda:0 (5.35/139.8 GiB) on startup is less than desired (0.2, 27.96 GiB)."
ENDED = f"""(EngineCore pid=112) ERROR 11-18 08:59:07 [core.py:1510] EngineCore failed to start.
(EngineCore pid=112) ERROR 11-18 08:59:07 [core.py:1510]     raise ValueError(
(EngineCore pid=112) ERROR 11-18 08:59:07 [core.py:1510] ValueError: {MEMORY}
Traceback (most recent call last):
ValueError: {MEMORY}
(APIServer pid=110) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
"""As vLLM 0.32 prints it on a GPU that others have filled, shortened."""


def test_a_server_that_ends_before_it_answers_is_an_error_with_vllm_s_own_reason(folder, installed, monkeypatch, capfd):
    """A user found it among hundreds of lines: the last of them say that it is above."""

    def popen(line, stdout, stderr, **_):
        assert stdout == stderr
        os.write(stdout, ENDED.encode())
        return Process(line, code=3)

    monkeypatch.setattr(verb.subprocess, "Popen", popen)
    assert main(["serve", str(folder), "--context", "1k", "--port", "0"]) == 1
    said = capfd.readouterr().err
    assert f"error: vLLM did not start (exit code 3): ValueError: {MEMORY}\n" in said
    assert ENDED in said, "and all of its words are passed on"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("", ""),
        ("INFO all is well\n", ""),
        (
            f"x.OutOfMemoryError: No memory. {'Process 1 has 7 GiB. ' * 12}\n",
            f"x.OutOfMemoryError: No memory{'. Process 1 has 7 GiB' * 9}",
        ),
        ("RuntimeError: Engine core initialization failed. See root cause above.\n", ""),
    ],
)
def test_a_cause_is_the_last_error_in_whole_sentences(said, why):
    assert words.cause(said) == why


def test_words_are_read_though_nobody_takes_them(tmp_path):
    """A terminal that is gone must not hold up the server."""
    read, write = os.pipe()
    closed = os.open(tmp_path / "gone", os.O_RDONLY | os.O_CREAT)
    heard = words.Words(read, closed)
    for _ in range(4):
        os.write(write, b"x" * (1 << 16))  # more than a pipe holds
    heard.forget()
    os.write(write, b"ValueError: later\n")
    os.close(write)
    assert heard.cause() == ""
    os.close(closed)


def test_the_reason_of_a_process_of_vllm_is_the_verb_s(folder, installed, monkeypatch, capsys):
    """vLLM's own last words are about a process that ended."""

    def popen(line, env, **_):
        monkeypatch.setenv(refusals.VARIABLE, env[refusals.VARIABLE])
        with pytest.raises(rpe3d.ConfigError), refusals.told():
            raise rpe3d.ConfigError("the cache is too small", "make it larger")
        return Process(line, code=1)

    monkeypatch.setattr(verb.subprocess, "Popen", popen)
    found = refusal(capsys, "serve", folder, "--context", "1k", "--port", "0")
    assert found == (1, "the cache is too small", "make it larger")


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("max-model-len=1025", "max-model-len is 1025, beyond the law's context 1024"),
        ("--max_model_len=2k", "max-model-len is 2000, beyond the law's context 1024"),
        ("port=9", "--vllm port would move the server to another address"),
    ],
)
def test_options_that_cannot_be_passed_on_are_refused(folder, installed, capsys, option, why):
    assert refusal(capsys, "serve", folder, "--context", "1k", f"--vllm={option}")[1] == why


def test_a_shorter_length_is_passed_on(folder, started):
    assert main(["serve", str(folder), "--context", "1k", "--vllm", "max-model-len=1K", "--port", "0"]) == 0
    assert started[0].line[-1] == "--max-model-len=1K"


def test_words_are_whole_though_the_reader_is_slow_and_writing_does_not_wait():
    """A pipe in non-blocking mode, as some terminals and supervisors leave stderr."""
    read, write = os.pipe()
    slow, out = os.pipe()
    os.set_blocking(out, False)
    heard = words.Words(read, out)
    said = bytes(range(256)) * 1200  # more than both pipes hold
    writer = Thread(target=lambda: (os.write(write, said), os.close(write)))
    writer.start()
    time.sleep(0.2)
    got = b""
    while len(got) < len(said):
        got += os.read(slow, 1 << 16)
    writer.join()
    heard.thread.join()
    assert got == said
    os.close(slow)
    os.close(out)
