"""Several benchmarks on one GPU: quality side by side, speed alone, memory as it is."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rpe3d.config import ConfigError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

import gpu  # noqa: E402 (found on the path above)
import several  # noqa: E402
from several import Job, Several  # noqa: E402

TICKS = "for i in 1 2 3 4 5 6 7 8; do date +%s.%N; sleep 0.1; done"


def run(jobs, out, seconds=20):
    made = Several(jobs, out)
    until = time.monotonic() + seconds
    while made.turn() and time.monotonic() < until:
        time.sleep(0.02)
    made.stop()
    return made


@pytest.fixture(autouse=True)
def plenty(monkeypatch):
    monkeypatch.setattr(several, "free_memory", lambda: 100.0)


def test_quality_is_halted_while_a_measurement_is_at_what_has_to_run_alone(tmp_path):
    """From its second `check` on; before it, engines start beside everything else."""
    speed = "echo check a; sleep 0.3; echo check b; date +%s.%N; sleep 0.6; date +%s.%N"
    jobs = [
        Job(name="q", command=TICKS, memory=1),
        Job(name="s", command=speed, memory=1, kind="speed", alone="^check ", lines=2),
        Job(name="after", command="date +%s.%N", memory=1, after=["s"]),
    ]
    run(jobs, tmp_path)
    ticks = [float(line) for line in (tmp_path / "q.log").read_text().split()]
    begun, over = (float(x) for x in (tmp_path / "s.log").read_text().split()[-2:])
    assert len(ticks) == 8
    assert not [tick for tick in ticks if begun + 0.2 < tick < over]
    assert ticks[0] < begun
    assert float((tmp_path / "after.log").read_text()) > over
    assert [job.process.returncode for job in jobs] == [0, 0, 0]
    assert "q: from 0 to" in (tmp_path / "status.txt").read_text()


def test_a_job_begins_when_the_gpu_has_room_and_a_measurement_that_waits_is_not_passed(tmp_path, monkeypatch):
    """Free memory is the GPU's own word; what a job has just promised counts until it can be seen."""
    jobs = [
        Job(name="first", command="sleep 0.5", memory=60),
        Job(name="speed", command="true", memory=50, kind="speed"),
        Job(name="small", command="true", memory=1),
    ]
    made = Several(jobs, tmp_path)
    made.turn()
    assert [job.process is not None for job in jobs] == [True, False, False]
    monkeypatch.setattr(several, "SETTLED", 0.0)
    made.turn()
    assert all(job.process is not None for job in jobs)
    made.stop()


def test_conditions_of_files_jobs_and_time(tmp_path):
    jobs = [
        Job(name="late", command="true", memory=0, before=-1),
        Job(name="maker", command=f"touch {tmp_path}/made", memory=0),
        Job(name="user", command="true", memory=0, needs=[str(tmp_path / "made")]),
    ]
    made = Several(jobs, tmp_path)
    (tmp_path / "add" / "more.json").write_text(json.dumps([{"name": "more", "command": "false", "memory": 0}]))
    until = time.monotonic() + 20
    while made.turn() and time.monotonic() < until:
        time.sleep(0.02)
    assert {job.name: job.process and job.process.returncode for job in made.jobs} == {
        "late": None, "maker": 0, "user": 0, "more": 1,
    }  # fmt: skip
    assert "late: not begun in time" in (tmp_path / "status.txt").read_text()


def job(**changed):
    return {"name": "a", "command": "true", "memory": 1} | changed


@pytest.mark.parametrize(
    ("jobs", "why"),
    [
        ({}, "no list of jobs"),
        ([{"name": "a"}], "no list of jobs"),
        ([job(ended=1)], "ended is not of a job"),
        ([job(command=5)], "command is 5"),
        ([job(name="../a")], "not one of a file"),
        ([job(alone="(")], "no list of jobs"),
        ([job(before="x")], "before is 'x'"),
        ([job(needs="ab")], "not a list of texts"),
        ([job(kind="other")], "kind"),
        ([job(), job()], "two jobs are called a"),
        ([job(after=["b"])], "waits for b, which is not a job"),
    ],
)
def test_a_file_that_is_wrong_is_refused_before_anything_runs(tmp_path, jobs, why):
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    with pytest.raises(ConfigError, match=why):
        several.read_jobs(tmp_path / "jobs.json")


def test_a_wrong_file_of_further_jobs_ends_none_and_what_a_job_leaves_behind_ends_with_it(tmp_path):
    """A file that is caught half-written must not cost the hours of the others."""
    jobs = [Job(name="a", command=f"(sleep 4; touch {tmp_path}/never) & sleep 0.3", memory=0)]
    made, began = Several(jobs, tmp_path), time.monotonic()
    (tmp_path / "add" / "half.json").write_text('[{"name": "late"')
    until = time.monotonic() + 20
    while made.turn() and time.monotonic() < until:
        time.sleep(0.02)
    assert jobs[0].process.returncode == 0
    assert [path.name for path in (tmp_path / "add").iterdir()] == ["half.refused"]
    time.sleep(max(0.0, began + 5 - time.monotonic()))
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_jobs_end_with_the_command(tmp_path, number):
    """A closed terminal too; a job that was halted ends as well."""
    jobs = [job(command=f"sleep 2; touch {tmp_path}/never"), job(name="s", command="sleep 60", kind="speed")]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    line = [sys.executable, str(BENCHMARKS / "several.py"), str(tmp_path / "jobs.json"), "--out", str(tmp_path / "out")]
    command = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    status = tmp_path / "out" / "status.txt"
    while not status.exists() or "alone" not in status.read_text():
        time.sleep(0.05)
    command.send_signal(number)
    _, said = command.communicate(timeout=30)
    assert command.returncode == (130 if number == signal.SIGINT else 1), said
    assert "Traceback" not in said
    time.sleep(2)
    assert not (tmp_path / "never").exists()


def test_the_command_ends_its_jobs_when_its_minutes_are_over(tmp_path):
    jobs = [{"name": "long", "command": f"sleep 60; touch {tmp_path}/never", "memory": 0}]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    line = [sys.executable, str(BENCHMARKS / "several.py"), str(tmp_path / "jobs.json"), "--out", str(tmp_path / "out")]
    done = subprocess.run([*line, "--minutes", "0.03"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    assert "long: from 0" in done.stdout
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(("said", "free"), [("81920\n", 80.0), ("", float("inf")), ("[N/A]\n", float("inf"))])
def test_free_memory_is_the_gpus_own_word(monkeypatch, said, free):
    done = subprocess.CompletedProcess(gpu.ASK, 0, stdout=said)
    monkeypatch.setattr(gpu.subprocess, "run", lambda *_, **__: done)
    assert gpu.free_memory() == free


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "jobs").glob("*.json")), ids=lambda path: path.name)
def test_the_lists_that_ship_are_commands_that_exist(path):
    """Of `rpe3d` every verb's own parser reads the line; of a benchmark its flags are looked up in its source."""
    from rpe3d.geometry import parse_laws
    from test_docs import parser_of

    for job in several.read_jobs(path):
        first, *words = shlex.split(re.sub(r"\$TEXTS", "a.txt b.txt", job.command))
        if first == "rpe3d":
            given = parser_of(words[0]).parse_args(words[1:])
            laws = getattr(given, "laws", None) or getattr(given, "law", None)
            assert parse_laws(laws if isinstance(laws, str) else ",".join(laws)), job.command
        elif first == "python":
            source = (BENCHMARKS.parent / words[0]).read_text()
            assert not [word for word in words if word.startswith("--") and f'"{word}"' not in source], job.command
        else:
            assert first == "make"
            assert re.search(rf"^{words[0]}:", (BENCHMARKS.parent / "Makefile").read_text(), flags=re.M)


def test_processes_in_sessions_of_their_own_are_halted_and_ended_with_their_job(tmp_path):
    """As vLLM's engines, which servers and tests start in a new session."""
    jobs = [
        Job(name="q", command="setsid bash -c 'while true; do date; sleep 0.05; done' & sleep 600", memory=1),
        Job(name="s", command=f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done", memory=1, kind="speed"),
    ]
    made = Several(jobs, tmp_path)

    def grows(seconds):
        until, size = time.monotonic() + seconds, (tmp_path / "q.log").stat().st_size
        while time.monotonic() < until and (tmp_path / "q.log").stat().st_size == size:
            time.sleep(0.02)
        return (tmp_path / "q.log").stat().st_size > size

    jobs[1].needs = [str(tmp_path / "begin")]
    made.turn()
    assert grows(60)
    (tmp_path / "begin").touch()
    while not made.halted:
        made.turn()
    time.sleep(0.2)  # a signal takes a moment
    assert not grows(1)
    (tmp_path / "go").touch()
    while made.halted:
        made.turn()
    assert grows(60)
    made.stop()
    until = time.monotonic() + 60
    while several.marked(jobs[0].mark) and time.monotonic() < until:
        time.sleep(0.02)
    assert not several.marked(jobs[0].mark)
