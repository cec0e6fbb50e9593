"""`rpe3d explore`: a page on this machine or in a file, with results or without."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from itertools import islice

import pytest
from refusal import refusal

from rpe3d.analysis.explore import page
from rpe3d.cli import main
from rpe3d.cli.explore import curves

pytestmark = pytest.mark.usefixtures("one_thread")  # the verb sets it, and other tests want theirs back
BUCKETS = [{"from": 0, "to": 128, "n": 128, "nll": 3.0}, {"from": 128, "to": 256, "n": 128, "nll": 1.0}]
ROW = {"law": "rope", "length": 256, "status": "ok", "ppl": 7.4, "tail_ppl": 7.0, "copy_nll": None, "passkey": None,
       "passkey_n": None, "positions": BUCKETS}  # fmt: skip
RESULTS = {
    "schema": 1, "kind": "compare", "model": {"name": "tiny", "pretrained": 512, "head_dim": 32, "rope_theta": 10000.0},
    "rows": [ROW, ROW | {"law": "dca", "status": "out of memory", "positions": []}],
}  # fmt: skip


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "compare.json"
    path.write_text(json.dumps(RESULTS))
    return path


@pytest.fixture
def few(monkeypatch):
    """A file of a handful of settings."""
    every = page.grid
    monkeypatch.setattr(page, "grid", lambda stops: islice(every(stops), 12))


def test_a_file_is_written_whole(tmp_path, results, few, capsys):
    out = tmp_path / "page.html"
    assert main(["explore", "--out", str(out), "--compare", str(results)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"wrote {out}" in captured.err
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert '"name":"tiny"' in out.read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.json", "page.html"]


def test_options_of_the_server_beside_a_file_are_said(tmp_path, few, capsys):
    assert main(["explore", "--out", str(tmp_path / "page.html"), "--port", "9000"]) == 0
    assert "note: --port has no effect without a server: --out writes a file" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_to_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    def never(*_, **__):
        raise AssertionError("it began")

    monkeypatch.setattr(page, "file_page", never)
    code, problem, _ = refusal(capsys, "explore", "--out", tmp_path)
    assert (code, problem) == (1, f"{tmp_path} is not a regular file")
    code, problem, _ = refusal(capsys, "explore", "--out", tmp_path / "no" / "page.html")
    assert (code, problem) == (1, f"there is no folder {tmp_path / 'no'}")


@pytest.mark.parametrize("text", ["{}", "[1]", "not json", '{"kind": "tune", "schema": 1}'])
def test_results_of_something_else_are_refused(tmp_path, capsys, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    code, problem, _ = refusal(capsys, "explore", "--compare", path, "--no-browser")
    assert (code, problem) == (1, f"{path} exists but holds no results of `rpe3d compare`")
    path.write_text('{"kind": "compare", "schema": 1, "model": {}, "rows": [{"law": "rope", "status": "ok"}]}')
    code, problem, _ = refusal(capsys, "explore", "--compare", path, "--no-browser")
    assert (code, problem) == (1, f"{path} is damaged ('length' is missing or wrong)")
    none = tmp_path / "none.json"
    assert refusal(capsys, "explore", "--compare", none)[1] == f"there is no file {none}"


def test_curves_are_the_report_s_of_the_rows_that_are_finished():
    """Perplexity as the report smooths it: the mean NLL of both buckets is 2 at either."""
    found = curves(RESULTS)
    assert found["laws"] == ["rope"]
    assert found["lengths"] == [256]
    assert found["model"] == {"name": "tiny", "pretrained": 512, "head_dim": 32, "rope_theta": 10000, "context": 512}
    (row,) = found["rows"]
    assert row["position"] == [64, 192]
    assert row["perplexity"] == pytest.approx([7.38906, 7.38906], rel=1e-4)
    assert (row["ppl"], row["copy_nll"]) == (7.4, None)


def test_results_without_a_finished_row_are_refused(tmp_path, capsys):
    path = tmp_path / "compare.json"
    path.write_text(json.dumps(RESULTS | {"rows": []}))
    assert refusal(capsys, "explore", "--compare", path)[1] == "the comparison has no finished row"


def test_a_port_that_is_taken_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, problem, hint = refusal(capsys, "explore", "--no-browser", "--port", port)
    assert (code, problem) == (1, f"cannot listen on 127.0.0.1:{port}: Address already in use")
    assert "--port" in hint


def test_it_says_where_the_page_is_serves_it_and_ends_with_ctrl_c():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "rpe3d", "explore", "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url, timeout=30) as answered:
            assert b"What would your model see?" in answered.read()
        process.send_signal(signal.SIGINT)
        _, words = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in words
