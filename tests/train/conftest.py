"""A tiny model with a chat template, texts that differ, and runs in processes of their own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from select import select

import pytest

import tiny_lm

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}[assistant]{% endif %}"
LAW = {"law": "3d-rpe", "parameters": {"chunk": 16, "window": 32, "reach": 64, "focus": 0, "fade": 0}}


@pytest.fixture(autouse=True)
def _tiny(one_thread):
    """All tests here."""


@pytest.fixture(scope="session")
def tokenizer():
    made = tiny_lm.tokenizer(bos=True)
    made.eos_token = "<s>"
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("train") / "model"
    tiny_lm.model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Five texts of different lengths, in words that can be learned."""
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    for i in range(5):
        words = " ".join(draw.choice(["sun", "moon", "star", "sky"]) for _ in range(150 + 40 * i))
        (folder / f"{i}.txt").write_text(words)
    return folder


@pytest.fixture(scope="session")
def asked(model_folder, texts):
    """Settings of a small run under a law whose far part the windows reach."""
    return {
        "kind": "lm", "model": str(model_folder), "context": 512, "length": 128, "data": [str(texts)], **LAW,
        "steps": 6, "batch": 4, "mix": 3, "learning_rate": 1e-2, "warmup": 2, "save_every": 2,
    }  # fmt: skip


@pytest.fixture(scope="session")
def worker(tmp_path_factory):
    """Runs a job in processes that are forked from one; returns their exit codes and what they said on stderr."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, Path(__file__).parent / "jobs.py"]
    said = tmp_path_factory.mktemp("jobs") / "stderr"
    with said.open("w") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
        process = subprocess.Popen(command, env=environment, **pipes)

    def run(job):
        before = said.stat().st_size
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        ready, *_ = select([process.stdout], [], [], 1800)
        answer = process.stdout.readline() if ready else ""
        assert answer, said.read_text()
        return json.loads(answer), said.read_bytes()[before:].decode()

    with process:
        yield run
        process.kill()


@pytest.fixture(scope="session")
def drive(worker):
    """Runs jobs, one after the other; returns their exit codes and what all of them said on stderr."""

    def run(*jobs):
        done = [worker(job) for job in jobs]
        return [codes for codes, _ in done], "".join(said for _, said in done)

    return run


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """Conversations of different lengths, in both forms."""
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    records = []
    for i in range(12):
        records.append({"instruction": "say it " * (i % 4 + 1), "input": "", "output": "sun moon " * (i % 5 + 1)})
    records[3] = {
        "messages": [
            {"role": "user", "content": "one?"},
            {"role": "assistant", "content": "sun"},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": "moon"},
        ]
    }
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file
