"""`recipes/fsdp2.yaml` on CPU processes with gloo: what one process learns, saved, killed and resumed.

The processes get the environment that `accelerate launch --config_file` makes of that file. Each asserts before every
step that all weights are divided.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from reading import losses
from safetensors.torch import load_file

from rpe3d.config import ConfigError
from rpe3d.train import Settings, sharded, sound

RECIPE = Path(__file__).parents[2] / "recipes" / "fsdp2.yaml"
RESULTS = {"full": "model/model.safetensors"}
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def runs(drive, asked, tmp_path_factory):
    """Two and three processes; runs are killed in their last step, or out of time after the first, and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    base = asked | {"steps": 3, "batch": 6, "save_every": 100, "precision": "fp32"}
    divided = {"config": str(RECIPE), "processes": 2}
    jobs, codes = [], []

    def job(name, settings, expected, **more):
        jobs.append({"settings": base | settings, "out": f"{folder}/{name}", **more})
        codes.append([expected] * more.get("processes", 1))

    for method in ("lora", "lora-plus", "full"):
        job(f"{method}-1", {"method": method}, 0)
        often = {"method": method, "save_every": 1}
        count = divided | {"processes": 3 if method == "lora" else 2}
        forwards = 6 // count["processes"]  # of a process in a step
        if method == "lora-plus":
            job(f"{method}-cut", {"method": method}, 3, **count, minutes=1e-9)  # time for one step
        else:
            job(f"{method}-cut", often, -9, **count, kill=["forward", 2 * forwards + 1])
        if method == "lora":
            jobs.append({"copy": [f"{folder}/lora-cut/checkpoint-2", f"{folder}/left/checkpoint-2"]})
            codes.append([])
        job(f"{method}-cut", often, 0, **divided)  # by two, whatever came before
    job("lora-2", {"sequence_parallel": 2}, 0, **divided)
    job("bf16-1", {"precision": "bf16"}, 0)
    job("bf16-2", {"precision": "bf16"}, 0, **divided)
    job("nan", {"save_every": 1}, 1, **divided, nan=[1, 3])
    found, said = drive(*jobs)
    assert found == codes, said
    return folder, said


@pytest.mark.parametrize(
    ("one", "several"),
    [("lora-1", "lora-cut"), ("lora-1", "lora-2"), ("lora-plus-1", "lora-plus-cut"), ("full-1", "full-cut")],
)
def test_processes_that_divide_a_model_learn_what_one_learns(runs, one, several):
    """Also in float32, although the file asks for bf16: `precision` decides."""
    folder, _ = runs
    assert losses(folder / several) == pytest.approx(losses(folder / one), rel=1e-6)
    result = RESULTS.get(one.removesuffix("-1"), ADAPTER)
    a, b = (load_file(folder / name / result) for name in (one, several))
    assert a.keys() == b.keys()
    for key in a:
        assert (a[key] - b[key]).norm() <= 1e-4 * a[key].norm(), key


def test_the_loss_of_divided_bfloat16_is_not_rounded_itself(runs):
    """accelerate's policy returns the loss in bfloat16, of which 6.5022 is 6.5."""
    folder, _ = runs
    assert losses(folder / "bf16-2") == pytest.approx(losses(folder / "bf16-1"), rel=1e-5)
    assert losses(folder / "bf16-2") != pytest.approx(losses(folder / "lora-1"), rel=1e-5)


def test_a_gradient_that_is_not_finite_in_a_part_stops_all_processes(runs):
    folder, said = runs
    assert said.count("the gradient of step 3 is not finite") == 2
    assert not (folder / "nan" / "adapter").exists()
    assert (folder / "nan" / "checkpoint-2").exists()


@pytest.mark.parametrize("name", [sharded.WEIGHTS, sharded.OPTIMIZER])
def test_a_damaged_checkpoint_of_divided_weights_is_found(runs, tmp_path, name):
    folder, _ = runs
    checkpoint = shutil.copytree(folder / "left" / "checkpoint-2", tmp_path / "checkpoint-2")
    assert sound.damage(checkpoint) is None
    file = checkpoint / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert sound.damage(checkpoint) == f"{name} is cut short or damaged"


def test_a_checkpoint_is_resumed_as_it_was_made(runs, asked, monkeypatch):
    folder, _ = runs
    with pytest.raises(ConfigError, match="checkpoint-2 was made under FSDP"):
        sharded.check(Settings(**asked), "cpu", folder / "left" / "checkpoint-2")
    ask_for_fsdp(monkeypatch)
    sharded.check(Settings(**asked), "cpu", folder / "left" / "checkpoint-2")
    with pytest.raises(ConfigError, match="was made without FSDP"):
        sharded.check(Settings(**asked), "cpu", folder / "lora-1" / "checkpoint-3")


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("FSDP_VERSION", "1", "fsdp_version is 1, but training supports only FSDP2"),
        ("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT", "saves whole checkpoints"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true", "reads a model's weights"),
        ("FSDP_OFFLOAD_PARAMS", "True", "on the device"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "both recompute activations"),
    ],
)
def test_a_configuration_that_cannot_be_saved_or_resumed_is_refused(asked, monkeypatch, variable, value, problem):
    ask_for_fsdp(monkeypatch)
    sharded.check(Settings(**asked), "cpu", None)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=problem):
        sharded.check(Settings(**asked), "cpu", None)


def ask_for_fsdp(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
