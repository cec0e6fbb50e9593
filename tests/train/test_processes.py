"""Several processes: the same losses and weights as one, to rounding (two, with gloo, on a CPU)."""

from __future__ import annotations

from pathlib import Path

import pytest
from reading import losses
from safetensors.torch import load_file

EVERY = {"steps": 4, "save_every": 100}
PLAIN = {"law": "linear", "parameters": {}}


@pytest.fixture(scope="module")
def runs(drive, asked, tmp_path_factory, chats):
    folder = tmp_path_factory.mktemp("runs")
    settings = asked | EVERY
    talk = settings | {"kind": "sft", "data": [str(chats)]}
    pose = settings | {"pose": 2}
    shared = {"sequence_parallel": 2}
    pairs = {
        "lm": (settings, {}),
        "sft": (talk, {}),
        "shared": (settings, shared),
        "shared-sft": (talk, shared),
        "shared-pose": (pose, shared),
        "shared-plain": (settings | PLAIN, shared),
    }
    jobs, seen = [], {}
    for name, (asks, more) in pairs.items():
        key = str(asks)
        if key not in seen:
            seen[key] = f"{folder}/{name}-1"
            jobs.append({"settings": asks, "out": seen[key]})
        jobs.append({"settings": asks | more, "out": f"{folder}/{name}-2", "processes": 2})
        pairs[name] = seen[key], f"{folder}/{name}-2"
    goes_on = {"settings": settings | {"save_every": 1}, "out": f"{folder}/cut", "processes": 2}
    jobs += [goes_on | {"kill": ["forward", 6]}, goes_on]
    codes, said = drive(*jobs)
    assert codes.pop(-2) == [-9, -9]
    assert all(code == 0 for both in codes for code in both), said
    return pairs | {"cut": (pairs["lm"][1], f"{folder}/cut")}


@pytest.mark.parametrize("name", ["lm", "sft", "shared", "shared-sft", "shared-pose", "shared-plain"])
def test_two_processes_learn_what_one_learns(runs, name):
    one, two = (Path(out) for out in runs[name])
    assert losses(two) == pytest.approx(losses(one), rel=1e-6)
    a, b = (load_file(out / "adapter" / "adapter_model.safetensors") for out in (one, two))
    assert a.keys() == b.keys()
    for key in a:  # AdamW divides small gradients by their size, and their rounding with them
        assert (a[key] - b[key]).norm() <= 1e-4 * a[key].norm(), key


def test_two_processes_that_are_killed_go_on_to_the_same_weights(runs):
    one, two = (Path(out) / "adapter" / "adapter_model.safetensors" for out in runs["cut"])
    assert one.read_bytes() == two.read_bytes()


def test_positions_that_skip_are_not_those_that_do_not(runs):
    """PoSE is at work in the runs above."""
    assert losses(Path(runs["shared-pose"][0])) != losses(Path(runs["shared"][0]))


def test_a_gradient_that_is_not_finite_in_one_process_stops_all_of_them_and_nothing_of_it_is_saved(
    drive, asked, tmp_path, runs
):
    """Each with the words of the process that has it: none waits for one that has stopped."""
    job = {"settings": asked | EVERY | {"save_every": 1}, "out": str(tmp_path / "run"), "processes": 2}
    codes, said = drive(job | {"nan": [1, 3]}, job)
    assert codes == [[1, 1], [0, 0]], said
    assert said.count("the gradient of step 3 is not finite") == 2
    weights = [Path(out) / "adapter" / "adapter_model.safetensors" for out in (tmp_path / "run", runs["lm"][1])]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("check", ["ulysses", "sharded"])
def test_gradients_over_two_processes_are_those_of_one(drive, check):
    """Ulysses, and FSDP2's `fully_shard`, with a law whose far part is reached; grouped heads that do not divide."""
    codes, said = drive({"check": check, "processes": 2})
    assert codes == [[0, 0]], said
