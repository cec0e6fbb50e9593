"""A run with a limit of minutes: it stops at a checkpoint, and goes on to the same bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from reading import losses

from rpe3d.config import ConfigError
from rpe3d.train import OutOfTime, Settings, limit, train


def test_a_run_that_is_out_of_time_goes_on_to_the_same_weights(asked, tmp_path):
    settings = Settings(**asked | {"steps": 3, "save_every": 100})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(settings, whole, device="cpu", minutes=60)
    for step in (1, 2):
        with pytest.raises(OutOfTime, match=f"after step {step} of 3; the same command resumes"):
            train(settings, parts, device="cpu", minutes=1e-9)
        assert (parts / f"checkpoint-{step}").is_dir()
        assert not (parts / "adapter").exists()
    train(settings, parts, device="cpu", minutes=1e-9)  # its last step is the end, whatever the time
    a, b = (out / "adapter" / "adapter_model.safetensors" for out in (whole, parts))
    assert a.read_bytes() == b.read_bytes()
    assert losses(whole) == losses(parts)


@pytest.mark.parametrize(("seconds", "stops"), [([10, 20, 11], [False, False, True]), ([41, 1, 1], [True] * 3)])
def test_it_stops_while_there_is_time_for_a_step_and_a_save(monkeypatch, seconds, stops):
    """Of the longest so far: with 80 s, after steps of 10 and 20 s, there is time for 2 x 20; then there is not.

    A save may be longer than a step: with 80 s it is taken for 8, and for what it took once there was one.
    """
    now = [100.0]
    monkeypatch.setattr(limit.time, "monotonic", lambda: now[0])
    made = limit.Limit(80 / 60, now[0])
    found = []
    for step, took in enumerate(seconds, 1):
        now[0] += took
        control = SimpleNamespace(should_save=False, should_training_stop=False)
        state = SimpleNamespace(global_step=step, max_steps=100)
        made.on_step_end(SimpleNamespace(device=torch.device("cpu")), state, control)
        found.append(control.should_save and control.should_training_stop)
    assert found == stops


def test_a_save_that_took_long_is_reckoned_with(monkeypatch):
    """Steps of 1 s, and a save of 30 after the first: of 80 s, 18 steps more leave 31 for another step and a save."""
    now = [0.0]
    monkeypatch.setattr(limit.time, "monotonic", lambda: now[0])
    made = limit.Limit(80 / 60, now[0])
    given = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(global_step=1, max_steps=100)

    def stopped(seconds):
        now[0] += seconds
        control = SimpleNamespace(should_save=False, should_training_stop=False)
        made.on_step_end(*given, control)
        return control.should_save

    assert not stopped(1)
    now[0] += 30
    made.on_save(*given, None)
    assert made.longest == 1
    assert not stopped(1)
    assert not any(stopped(1) for _ in range(17))
    assert stopped(1)


def test_minutes_below_zero_are_refused(asked, tmp_path):
    with pytest.raises(ConfigError, match="minutes is -1"):
        train(Settings(**asked), tmp_path / "run", device="cpu", minutes=-1.0)
