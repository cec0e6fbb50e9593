"""A run that is killed goes on to the same end, bit for bit (issue: it survives)."""

from __future__ import annotations

import pytest
from reading import losses
from safetensors.torch import load_file


def weights(out):
    return (out / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def runs(drive, asked, tmp_path_factory):
    """One run undisturbed, and one that is killed in a step, in a checkpoint, and after the last step."""
    folder = tmp_path_factory.mktemp("runs")
    codes, _ = drive(
        {"settings": asked, "out": f"{folder}/whole"},
        {"settings": asked, "out": f"{folder}/killed", "kill": ["forward", 11]},
        {"settings": asked, "out": f"{folder}/killed", "kill": ["rename", 1]},
        {"settings": asked, "out": f"{folder}/killed", "kill": ["rename", 3]},
        {"settings": asked, "out": f"{folder}/killed"},
    )
    return folder, codes


def test_kill_9_at_any_moment_leads_to_the_same_weights_and_losses(runs):
    folder, codes = runs
    assert codes == [[0], [-9], [-9], [-9], [0]]
    assert weights(folder / "whole") == weights(folder / "killed")
    assert losses(folder / "whole") == losses(folder / "killed")
    assert len(losses(folder / "whole")) == 6


def test_the_run_learned_something(runs):
    folder, _ = runs
    first, *_, last = losses(folder / "whole")
    assert last < first - 0.05
    trained = load_file(folder / "whole" / "adapter" / "adapter_model.safetensors")
    assert all(x.abs().max() > 0 for name, x in trained.items() if "lora_B" in name)


def test_nothing_half_written_is_left(runs):
    folder, _ = runs
    names = sorted(path.name for path in (folder / "killed").iterdir())
    assert names == ["adapter", "checkpoint-6", "log.csv", "loss.png", "run.json"]
