"""`rpe3d doctor MODEL`: what a checkpoint carries already, and what its caches take."""

from __future__ import annotations

import json

import pytest
import torch
from refusal import refusal

from rpe3d import extend
from rpe3d.cli import main
from tiny_models import make

DUAL = {"chunk_size": 64, "local_size": 16, "original_max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Tiny models."""


def doctor(model, tmp_path, *arguments):
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    file = tmp_path / "doctor.json"
    assert main(["doctor", str(tmp_path / "model"), *arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text())["model"]


def test_the_caches_of_a_context_are_told_in_the_type_of_the_checkpoint(tmp_path):
    """2 layers x keys and values x 2 heads x 16 dimensions x 2 bytes x 2^23 tokens = 2 GiB."""
    told = doctor(make(), tmp_path, "--context", "8m")
    line = told[f"cache at {8 * 2**20}"]
    assert line.startswith(
        "dynamic 2 GiB; static 2 GiB; offloaded 2 GiB; fp8 1 GiB; 4 bits 0.563 GiB; 2 bits 0.313 GiB"
    )
    assert line.endswith("(one sequence, bfloat16)")


def test_a_window_takes_what_it_keeps(tmp_path):
    """Gemma 3: one layer of six sees the whole text; a window cannot be rounded."""
    told = doctor(make("gemma3_text", sliding_window=16), tmp_path, "--context", "16m")
    line = told[f"cache at {16 * 2**20}"]
    assert line.startswith("dynamic 2 GiB; static 2 GiB; offloaded 2 GiB; fp8, 4 bits, 2 bits not for this model")


def test_what_a_checkpoint_carries_is_named_with_the_command_that_uses_it(tmp_path):
    told = doctor(make("qwen2", dual_chunk_attention_config=DUAL, max_position_embeddings=256), tmp_path)
    assert told["carries"].startswith("dual chunk attention, 64 to 256 positions: the law 'dca', chunk 48, window 64")
    assert told["to use it"] == f"rpe3d extend {tmp_path / 'model'} --law dca --context 256 --out DIR"
    assert told["pretrained context"] == "64"


@pytest.mark.parametrize(
    ("own", "chosen"),
    [
        ({}, ""),
        ({"far": 4, "block": 8}, ", far keys chosen: 4 blocks of 8"),
        (
            {"far": 4, "block": 8, "full": 1},
            ", far keys chosen: 4 blocks of 8, and all of them seen beside these in layer 1",
        ),
        (
            {"far": 4, "block": 8, "full": "all"},
            ", far keys chosen: 4 blocks of 8, and all of them seen beside these in every layer",
        ),
    ],
)
def test_a_chosen_far_field_is_told_with_the_law(own, chosen, tmp_path):
    """costs.md says that doctor tells what runs: a reviewer's checkpoint under far=4 read like one that sees all."""
    model = extend(make(max_position_embeddings=64), "3d-rpe", context=512, chunk=8, window=16, reach=48, **own)
    assert doctor(model, tmp_path)["law"] == f"3d-rpe, 64 to 512 positions{chosen}"


def test_a_scaled_base_is_named(tmp_path):
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    told = doctor(make(rope_parameters=parameters, max_position_embeddings=256), tmp_path)
    assert told["carries"] == "yarn, 64 to 256 positions"
    assert "to use it" not in told


def test_a_context_without_a_model_is_refused(capsys):
    code, problem, hint = refusal(capsys, "doctor", "--context", "64k")
    assert (code, problem) == (1, "--context is given without a model")
    assert "add MODEL" in hint
