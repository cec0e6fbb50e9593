"""Measuring servers: what was measured is kept, what is wrong is said, and a near tie is no error."""

from __future__ import annotations

import csv
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rpe3d.config import ConfigError

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

import serve  # noqa: E402 (found on the path above)
import serve_peers  # noqa: E402
import soak  # noqa: E402


class Engine:
    """Answers in a second a token, with token 7; after so many questions it breaks."""

    def __init__(self, questions=1000, log=-1.0):
        self.questions, self.log, self.asked = questions, log, []

    def ask(self, prompts, new, *, logs=False):
        self.questions -= 1
        if self.questions < 0:
            raise OSError("gone")
        self.asked.append((len(prompts), len(prompts[0]), prompts[0][0], new))
        return {
            "seconds": float(new),
            "decode": float(new - 1),
            "answers": [[(7, self.log)] * new for _ in prompts] if logs else [],
        }

    def blocks(self):
        return 100

    def room(self):
        return 1600


def given(folder, **changed):
    usual = {
        "parts": list(serve.PARTS),
        "lengths": [100, 400],
        "batches": [1, 2, 8],
        "most": 10**6,
        "new": 4,
        "short": 3,
    }
    usual |= {"repeat": 2, "mode": "offline", "filled": False, "out": folder, "name": "serve", "model": None}
    return Namespace(**usual | changed)


def model(dummy=True):
    law = SimpleNamespace(exact_up_to=64, context=512)
    made = serve_peers.Model(called="tiny", dtype="bfloat16", vocabulary=50, cuda=False, dummy=dummy)
    made.laws["3d-rpe"] = law
    return made


def measured(folder, peers, seconds=1e6, **changed):
    asked, made = given(folder, **changed), model()
    table = serve.Table(asked.mode, True, lambda rows: serve.write(rows, asked, made))
    serve.measure(peers, asked, made, serve.Clock(serve.time.monotonic() + seconds), table)
    return table


def written(folder):
    with (folder / "serve-cpu.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_row_is_in_the_file_when_an_engine_breaks(tmp_path):
    peers = {"rope": Engine(), "3d-rpe": Engine(questions=12)}
    with pytest.raises(OSError, match="gone"):
        measured(tmp_path, peers)
    assert [row["what"] for row in written(tmp_path)][:3] == ["cache", "short", "first"]


def test_batches_beyond_the_room_of_an_engine_are_left_out(tmp_path, capsys):
    rows = measured(tmp_path, {"rope": Engine(), "3d-rpe": Engine()}).rows
    assert [(r["tokens"], r["batch"]) for r in rows if r["what"] == "decode"] == [
        (100, 1),
        (100, 2),
        (100, 8),
        (400, 1),
        (400, 2),
    ]
    assert "400 x8: more than the 1600 tokens" in capsys.readouterr().out


def test_nothing_is_begun_after_the_budget(tmp_path):
    assert [row["what"] for row in measured(tmp_path, {"rope": Engine(), "3d-rpe": Engine()}, seconds=-1).rows] == [
        "cache"
    ]


def test_prompts_for_decoding_alone_are_marked_as_read(tmp_path):
    engine = Engine()
    measured(tmp_path, {"rope": Engine(), "3d-rpe": engine}, filled=True)
    assert {first == serve_peers.MARK for _, length, first, _ in engine.asked if length in (95, 395)} == {True}
    assert all(first > serve_peers.MARK for _, length, first, _ in engine.asked if length not in (95, 395))


def test_answers_unlike_the_plain_engines_are_reported_not_timed_in_silence(capsys):
    assert serve.check({"rope": Engine(), "3d-rpe": Engine(log=-1.1)}, model()) == []
    (wrong,) = serve.check({"rope": Engine(), "3d-rpe": Engine(log=-1.3)}, model())
    assert "3.00e-01 from the plain engine" in wrong
    assert "WRONG 3d-rpe" in capsys.readouterr().out


@pytest.mark.parametrize(("off", "noise", "right"), [(0.1, 0.0, True), (0.3, 0.1, True), (0.3, 0.01, False)])
def test_rounding_is_allowed_what_it_does_in_transformers(monkeypatch, off, noise, right):
    monkeypatch.setattr(serve_peers, "from_transformers", lambda *_: (off, noise))
    assert (serve.check({"rope": Engine(), "3d-rpe": Engine()}, model(dummy=False)) == []) == right


def test_an_answer_may_part_from_the_quiet_one_at_a_near_tie_alone():
    class Client:
        def ties(self, text, new, within):
            return [5, 6, 7], [{5}, {6, 9}, {7}]

    quiet = soak.Soak(Client(), [[1]], new=3, in_flight=1, tie=0.1)
    assert quiet.tied(0, [5, 9, 4])
    assert not quiet.tied(0, [5, 8, 7])
    assert not quiet.tied(0, [5, 6])


@pytest.mark.parametrize(("free", "fits"), [(80.0, True), (40.0, False), (float("inf"), True)])
def test_engines_that_the_gpu_has_no_room_for_are_refused_before_they_start(tmp_path, monkeypatch, free, fits):
    """Three engines of 16 + 3 GiB; where nothing is known, vLLM finds out."""
    made = serve_peers.Model(called="tiny", dtype="bfloat16", vocabulary=50, cuda=True, dummy=False)
    made.sources = dict.fromkeys(("rope", "3d-rpe", "dca"), str(tmp_path))
    monkeypatch.setattr(serve_peers, "free_memory", lambda: free)
    if fits:
        serve_peers.check_room(made, 16.0)
    else:
        with pytest.raises(ConfigError, match="3 engines need 57 GiB, and 40 GiB of the GPU are free"):
            serve_peers.check_room(made, 16.0)
