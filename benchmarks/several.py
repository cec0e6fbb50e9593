"""Several benchmarks on one GPU in little time: those of quality side by side, those of speed alone.

    python benchmarks/several.py JOBS.json --out DIR                # until all have ended
    python benchmarks/several.py JOBS.json --out DIR --minutes 25   # or until the machine goes back

A job: {"name", "command": for a shell, "memory": GiB that it takes of the GPU, "kind": "quality" | "speed", default the
first, "needs": [paths that have to exist], "after": [names of jobs that have to have ended], "alone": a pattern of its
output, "lines": how often, default once, "before": seconds after which it is no longer begun}. Jobs begin in their
order, as soon as they may and the GPU has the memory free, which nvidia-smi says and no sum of guesses.

While a job of speed runs, all of quality are halted (SIGSTOP); with `alone` only from the line on that matches for the
last time, so that its engines start and its checks run beside them. Files DIR/add/*.json bring further jobs; one that
is wrong is called *.refused. Output goes to DIR/NAME.log, and what runs, has ended or waits to DIR/status.txt, every
second. What a job leaves behind ends with it, and all jobs end with an interrupt or the terminal. A job's processes are
known by a mark in their environment, since engines and servers run in sessions of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gpu import free_memory
from limit import OUT_OF_TIME, command
from rpe3d import files
from rpe3d.config import ConfigError, choice, real

KINDS = ("quality", "speed")
SPARE = 2.0
"""GiB that stay free: programs need some before they say so."""
SETTLED = 20.0
"""Seconds until what a program takes can be seen; until then what it said counts."""
MARK = "RPE3D_JOB"
"""Environment variable by which the processes of a job are found."""


@dataclass(kw_only=True)
class Job:
    """A command and the conditions under which it runs."""

    name: str
    command: str
    memory: float
    kind: str = "quality"
    needs: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    alone: str = ""
    lines: int = 1
    before: float = float("inf")
    process: subprocess.Popen[bytes] | None = None
    begun: float = 0.0
    ended: float | None = None

    @property
    def runs(self) -> bool:
        return self.process is not None and self.ended is None

    @property
    def mark(self) -> str:
        return f"{os.getpid()}:{self.name}"

    def begin(self, log: Path) -> None:
        """Start the command. `SPT_NOENV` keeps vLLM's processes, which name themselves, from writing over the mark."""
        environment = os.environ | {MARK: self.mark, "SPT_NOENV": "1"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", self.command],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    def signal(self, number: int) -> None:
        """Send a signal to every process that the job started, also those that these start meanwhile."""
        reached: set[int] = set()
        while new := marked(self.mark) - reached:
            for process in new:
                with suppress(ProcessLookupError):
                    os.kill(process, number)
            reached |= new


def marked(mark: str) -> set[int]:
    """Return the numbers of the processes whose environment has the mark of a job."""
    line, found = f"{MARK}={mark}".encode(), set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if line in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found


def read_jobs(path: Path, others: Collection[str] = ()) -> list[Job]:
    """Read a file of jobs; refuse one that is not as the module says. `others` are the names of jobs before them."""
    with files.refusing(f"cannot read {path}", "name a file of jobs"):
        text = path.read_text(encoding="utf-8")
    known = {one.name for one in fields(Job)} - {"process", "begun", "ended"}
    try:
        made = [made_job(one, known) for one in _list(json.loads(text))]
    except (ValueError, TypeError, re.error) as error:
        raise ConfigError(f"{path} holds no list of jobs ({error})", f"a job has {', '.join(sorted(known))}") from None
    names = [*others, *(job.name for job in made)]
    for job in made:
        choice("kind", job.kind, KINDS)
        real("memory", job.memory, least=0.0)
        if names.count(job.name) > 1:
            raise ConfigError(f"two jobs are called {job.name}", "give each a name of its own: their output would mix")
        if unknown := sorted(set(job.after) - set(names)):
            raise ConfigError(f"{job.name} waits for {unknown[0]}, which is not a job", "correct `after`")
    return made


def _list(found: Any) -> list[Any]:
    if not isinstance(found, list):
        raise TypeError(f"a {type(found).__name__}")
    return found


def made_job(given: dict[str, Any], known: Collection[str]) -> Job:
    """Return the job of a file's entry; refuse what it cannot be, before anything runs."""
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(f"{unknown[0]} is not of a job")
    job = Job(**given)
    for name, kind in (("name", str), ("command", str), ("alone", str), ("lines", int), ("before", (int, float))):
        if not isinstance(getattr(job, name), kind):
            raise TypeError(f"{name} is {getattr(job, name)!r}")
    for name in ("needs", "after"):
        if not isinstance(value := getattr(job, name), list) or not all(isinstance(one, str) for one in value):
            raise TypeError(f"{name} is {value!r}, not a list of texts")
    if not re.fullmatch(r"[\w.-]+", job.name) or job.name.startswith("."):
        raise ValueError(f"the name {job.name!r} is not one of a file")
    re.compile(job.alone)
    return job


class Several:
    """Jobs and their output folder; `turn` brings everything on by one look."""

    def __init__(self, jobs: list[Job], out: Path) -> None:
        self.jobs, self.out = jobs, out
        self.start = time.monotonic()
        self.halted = False
        with files.refusing(f"cannot make {out}", "give --out a folder that can be written to"):
            (out / "add").mkdir(parents=True, exist_ok=True)

    @property
    def now(self) -> float:
        return time.monotonic() - self.start

    def turn(self) -> bool:
        """Take in new jobs, note ends, halt or go on, begin what may begin; say whether anything is left."""
        for path in sorted((self.out / "add").glob("*.json")):
            try:
                self.jobs += read_jobs(path, [job.name for job in self.jobs])
                path.unlink()
            except ConfigError as error:
                print(f"refused: {error}", flush=True)
                path.rename(path.with_suffix(".refused"))
        for job in self.jobs:
            if job.runs and job.process is not None and job.process.poll() is not None:
                job.ended = self.now
                job.signal(signal.SIGKILL)  # what it left behind
        self._halt(any(self._alone(job) for job in self.jobs))
        if not self.halted:
            self._begin()
        self._tell()
        return any(job.runs or self._waits(job) for job in self.jobs)

    def _waits(self, job: Job) -> bool:
        return job.process is None and self.now <= job.before

    def _alone(self, job: Job) -> bool:
        """Say whether a job of speed is at what has to run alone."""
        if job.kind != "speed" or not job.runs:
            return False
        said = (self.out / f"{job.name}.log").read_text(encoding="utf-8", errors="replace")
        return not job.alone or len(re.findall(job.alone, said, re.M)) >= job.lines

    def _halt(self, wanted: bool) -> None:
        for job in self.jobs:
            if wanted != self.halted and job.runs and job.kind == "quality":
                job.signal(signal.SIGSTOP if wanted else signal.SIGCONT)
        self.halted = wanted

    def _begin(self) -> None:
        """Begin jobs in their order; one of speed that waits for memory keeps those behind it from taking that."""
        ended = {job.name for job in self.jobs if job.ended is not None}
        promised = sum(job.memory for job in self.jobs if job.runs and self.now - job.begun < SETTLED)
        room = free_memory() - promised - SPARE
        measuring = any(job.runs and job.kind == "speed" for job in self.jobs)
        for job in self.jobs:
            ready = all(Path(path).expanduser().exists() for path in job.needs) and ended.issuperset(job.after)
            if not self._waits(job) or not ready or (job.kind == "speed" and measuring):
                continue
            if job.memory <= room:
                job.begin(self.out / f"{job.name}.log")
                job.begun = self.now
                measuring |= job.kind == "speed"
            if job.runs or job.kind == "speed":
                room -= job.memory

    def _tell(self) -> None:
        def line(job: Job) -> str:
            if job.process is None:
                return "waits" if self._waits(job) else "not begun in time"
            over = "" if job.ended is None else f" to {job.ended:.0f} s, status {job.process.returncode}"
            return f"from {job.begun:.0f}{over}"

        lines = [f"{self.now:.0f} s{', a measurement runs alone' * self.halted}"]
        files.write_text(
            self.out / "status.txt", "\n".join([*lines, *(f"{job.name}: {line(job)}" for job in self.jobs), ""])
        )

    def stop(self) -> None:
        """End whatever still runs."""
        for job in self.jobs:
            if job.runs and job.process is not None:
                job.signal(signal.SIGKILL)  # a halted one ends as well
                job.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path, metavar="JOBS.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for output and status")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end all jobs after so many; default never")
    given = parser.parse_args()
    if not given.minutes > 0:
        parser.error(f"--minutes is {given.minutes:g}, and has to be more than 0")
    several = Several(read_jobs(given.jobs), given.out)
    left = True
    try:
        while left and several.now < 60 * given.minutes:
            left = several.turn()
            time.sleep(0.5)
    except KeyboardInterrupt:
        return 130
    finally:
        several.stop()
    print((given.out / "status.txt").read_text(encoding="utf-8"), end="")
    if left:
        return OUT_OF_TIME
    return int(any(job.process is None or job.process.returncode for job in several.jobs))


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    command(main)
