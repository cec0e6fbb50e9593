"""A law as a user asks for it: refused before a model is looked for, made when there is one."""

from __future__ import annotations

import pytest

from rpe3d import ConfigError, make_law
from rpe3d.geometry import LawSpec

MODEL = {"pretrained": 64, "head_dim": 16, "rope_theta": 1e5}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "3drpe", "parameters": {}}, "law '3drpe' is not known: did you mean '3d-rpe'?"),
        ({"name": "yarn", "parameters": {"chunk": 1}}, "law 'yarn' has no parameter 'chunk'"),
    ],
)
def test_what_no_law_has_is_refused_before_a_model_is_looked_for(given, message):
    with pytest.raises(ConfigError, match=message):
        LawSpec(label="mine", **given)


@pytest.mark.parametrize(("length", "context"), [(32, 64), (64, 64), (200, 200)])
def test_a_law_is_made_for_a_length_and_at_least_for_the_pretrained_one(length, context):
    spec = LawSpec(label="mine", name="3d-rpe", parameters={"chunk": 4})
    assert spec.at(length, MODEL) == make_law("3d-rpe", context=context, chunk=4, **MODEL)


def test_a_law_file_is_for_models_of_its_length_and_a_name_for_all():
    LawSpec(label="3d-rpe", name="3d-rpe", parameters={}).check(64)
    tuned = LawSpec(label="tuned", name="3d-rpe", parameters={}, pretrained=64)
    tuned.check(64)
    with pytest.raises(ConfigError, match="tuned was made for a model of 64 positions, and this one has 128"):
        tuned.check(128)
