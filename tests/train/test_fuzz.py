"""Random lives of a run: killed anywhere, changed in one thing, run again.

Its own oracle is a run that nothing disturbs. Whatever happens, a command either ends with exactly the losses and the
weights of such a run, bit for bit, or refuses in words and loses nothing. What a run has no reason to refuse, it does.
`pytest tests/train/test_fuzz.py --fuzz 20` draws twenty times as many lives.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path

import pytest
from reading import losses
from safetensors.torch import load_file, save_file

LIVES = 4  # about half a minute on one core
COMMANDS = 4
EVENTS = (8, 24, 48)  # forwards, writes and renames: in a step, until a checkpoint, in a run of four steps
SMALL = {"length": 64, "steps": 4, "batch": 2, "mix": 2, "warmup": 1, "save_every": 2, "gradient_checkpointing": False}
CHANGES = {
    "data": (0, 1, 2, 3),
    "weights": (0, 1),
    "seed": (0, 1),
    "learning_rate": (1e-2, 5e-3),
    "parameters": (
        {"chunk": 16, "window": 32, "reach": 64, "focus": 0, "fade": 0},
        {"chunk": 8, "window": 32, "reach": 64, "focus": 0, "fade": 0},
    ),
    "steps": (4, 2, 3, 5),
    "batch": (2, 4),
    "schedule": ("constant", "cosine"),
}
"""What may be changed, and to what. Data 2 is too short to train on; data 3 differs at an end that is seldom read."""
RESULT = "adapter/adapter_model.safetensors"


class Workshop:
    """Runs commands in processes of their own, and keeps what undisturbed runs have made."""

    def __init__(self, worker, asked, folder):
        self.worker, self.asked, self.folder, self.fresh = worker, asked | SMALL, folder, {}

    def run(self, world, place, **how):
        """The exit code of a command, and what it said when it refused."""
        self.lay_out(world, place)
        said = place / "said"
        said.unlink(missing_ok=True)
        own = {key: value for key, value in world.items() if key not in ("data", "weights")}
        paths = {"data": [str(place / "data")], "model": str(place / "model")}
        job = {"settings": {**self.asked, **own, **paths}, "out": str(place / "run"), "say": str(said), **how}
        (code,), _ = self.worker(job)
        return code, said.read_text() if said.exists() else ""

    def lay_out(self, world, place):
        """Write the data and the weights of a world, under names that are always the same."""
        shutil.rmtree(place / "data", ignore_errors=True)
        if world["data"] == 2:
            (place / "data").mkdir(parents=True)
            (place / "data" / "0.txt").write_text("too short")
        else:
            shutil.copytree(self.asked["data"][0], place / "data")
            text = (place / "data" / "1.txt").read_text()
            at = {0: len(text), 1: 40, 3: 500}[world["data"]]
            (place / "data" / "1.txt").write_text(text[:at] + text[at:].upper())
        if not (place / "model").exists():
            shutil.copytree(self.asked["model"], place / "model")
        weights = load_file(Path(self.asked["model"]) / "model.safetensors")
        weights["model.norm.weight"][0] += world["weights"]
        save_file(weights, place / "model" / "model.safetensors", metadata={"format": "pt"})

    def undisturbed(self, world):
        """Losses and weights of a run from the beginning; None where it is refused."""
        key = json.dumps(world, sort_keys=True)
        if key not in self.fresh:
            place = self.folder / f"fresh-{len(self.fresh)}"
            code, said = self.run(world, place)
            assert code in (0, 1), (world, code)
            assert code == 0 or "no document is as long as a window" in said
            self.fresh[key] = made(place / "run") if code == 0 else None
            shutil.rmtree(place)
        return self.fresh[key]


def made(out):
    return losses(out), (out / RESULT).read_bytes()


def kept(out):
    """All that a refusal must not touch."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def steps_in(out):
    """Steps that a refusal would protect."""
    found = [int(path.name.partition("-")[2]) for path in out.glob("checkpoint-*")]
    note = json.loads((out / "run.json").read_text()) if (out / "run.json").exists() else {}
    return max([0, *found, note.get("finished", note["steps"]) if (out / "adapter").exists() else 0])


def may_refuse(world, owner, out):
    """Whether a command has a reason to refuse: another run than the one whose steps the folder holds."""
    held = steps_in(out)
    if not held:
        return False
    differing = [key for key in world if world[key] != owner[key]]
    if differing == ["steps"] and world["schedule"] == "constant":
        return world["steps"] < held
    return bool(differing)


def may_be_taken(world, owner):
    """Whether a command that has a reason to refuse may find that there is none: the data read so far is the same."""
    return all(world[key] == owner[key] for key in world if key != "data")


def live(workshop, draw, place):
    """One life; returns what happened, for a failure to show."""
    world = {key: values[0] for key, values in CHANGES.items()}
    world["schedule"] = draw.choice(CHANGES["schedule"])
    owner, story, out = world, [], place / "run"
    out.mkdir(parents=True)
    for number in range(COMMANDS + 1):
        last = number == COMMANDS
        world = copy.deepcopy(owner)
        if not last and draw.random() < 0.6:
            what = draw.choice(list(CHANGES))
            world[what] = draw.choice(CHANGES[what])
        how = {} if last else draw.choice([{}, {"nan": [0, draw.randint(1, 4)]}] + 3 * [{"kill": 1}])
        if "kill" in how:
            how = {"kill": ["event", draw.randint(1, draw.choice(EVENTS))]}
        reason, before = may_refuse(world, owner, out), kept(out)
        code, said = workshop.run(world, place, **how)
        story.append(({key: world[key] for key in world if world[key] != owner[key]}, how, code, said))
        if code == 0:
            assert made(out) == workshop.undisturbed(world), story
        elif code == 1 and reason:
            assert kept(out) == before, story
        elif code == 1 and "nan" in how and "is not finite" in said:
            assert steps_in(out) >= how["nan"][1] - 2, story  # of the steps before it, none that was saved
        elif code == 1:
            assert workshop.undisturbed(world) is None, story
        else:
            assert (code, list(how)) == (-9, ["kill"]), story
        if not reason:
            assert ": " in said or code != 1, story
            owner = world
        elif code != 1:
            assert may_be_taken(world, owner), story
            owner = world
        if workshop.undisturbed(owner) is None:  # data to train on
            owner = owner | {"data": 0}
    assert code == 0, story
    return story


@pytest.fixture(scope="module")
def workshop(worker, asked, tmp_path_factory):
    return Workshop(worker, asked, tmp_path_factory.mktemp("fresh"))


def test_a_run_ends_as_if_nothing_had_happened_or_refuses_and_loses_nothing(workshop, tmp_path, request):
    for seed in range(LIVES * request.config.getoption("--fuzz")):
        live(workshop, random.Random(f"story {seed}"), tmp_path / str(seed))
        shutil.rmtree(tmp_path / str(seed))
