"""The defaults are the paper's, and what cannot be is said before anything is loaded."""

from __future__ import annotations

import json

import pytest

from rpe3d.config import ConfigError
from rpe3d.train.settings import Settings, read_recipe

LEAST = {"kind": "lm", "model": "m", "context": 32768, "data": ["d"]}


def test_the_defaults_are_the_papers_training_setting():
    """Paper, "Training Setting": LoRA, AdamW 0.9 / 0.95, 2e-5, batch 8; 1000 steps at 32k, 3000 for chat."""
    lm, sft = Settings(**LEAST), Settings(**LEAST | {"kind": "sft"})
    assert (lm.steps, sft.steps) == (1000, 3000)
    assert (lm.batch, lm.micro_batch, lm.learning_rate, lm.beta1, lm.beta2) == (8, 1, 2e-5, 0.9, 0.95)
    assert (lm.method, lm.rank, lm.alpha, lm.law, lm.length) == ("lora", 8, 16, "3d-rpe", 32768)


def test_settings_come_back_from_what_they_say():
    made = Settings(**LEAST, law="yarn", parameters={"beta_fast": 16.0}, length=1024, pose=2)
    assert Settings(**json.loads(json.dumps(made.to_dict()))) == made


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"kind": "rl"}, "kind 'rl' is not known"),
        ({"law": "3d"}, "law '3d' is not known"),
        ({"parameters": {"beta": 1}}, "law '3d-rpe' has no parameter 'beta'"),
        ({"data": []}, "no data is given"),
        ({"length": 65536}, "length is 65536, above the context 32768"),
        ({"pose": 1, "length": 8}, "pose is 1"),
        ({"pose": 2}, "pose has no positions to skip to"),
        ({"pose": 2, "length": 8, "kind": "sft"}, "pose would also skip positions inside answers"),
        ({"attention": "s2", "sequence_parallel": 2}, "s2 cannot be combined with"),
        ({"attention": "s2", "length": 7}, "too short for the four groups of s2"),
        ({"length": 1001, "sequence_parallel": 2}, "windows of 1001 tokens cannot be shared by 2 processes"),
        ({"method": "qlora"}, "method 'qlora' is not known"),
        ({"batch": 0}, "batch is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"beta1": 1.5}, "beta1 is 1.5, not below 1"),
        ({"beta2": 1}, "beta2 is 1, not below 1"),
    ],
)
def test_what_cannot_be_is_refused(given, problem):
    with pytest.raises(ConfigError, match=problem.replace("(", "\\(")):
        Settings(**LEAST | given)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "is not JSON"), ("[]", "is not a recipe"), ('{"lr": 1}', "the recipe r.json has no parameter 'lr'")],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text, problem):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_recipe(tmp_path / "r.json")
    with pytest.raises(ConfigError, match="cannot read the recipe"):
        read_recipe(tmp_path / "none.json")
