"""A law as a user asks for it: refused before a model is looked for, made when there is one."""

from __future__ import annotations

import json

import pytest

from rpe3d import ConfigError, make_law
from rpe3d.geometry import LawSpec, parse_law, parse_laws, read_law

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
    with pytest.raises(ConfigError, match="tuned was made for a model of 64 positions, but this one has 128"):
        tuned.check(128)


def test_a_law_may_have_a_short_name():
    """`near=3d-rpe:...`: the label is what tables and plots show."""
    spec = parse_law("near=3d-rpe:chunk=4,reach=32")
    assert (spec.label, spec.name, spec.parameters) == ("near", "3d-rpe", {"chunk": 4, "reach": 32})
    text = "3d-rpe:chunk=4,reach=32,near=3d-rpe:reach=16,focus=0, plain=yarn,own=3d-rpe-definition:interpolate=true"
    assert [(spec.label, spec.name) for spec in parse_laws(text)] == [
        ("3d-rpe:chunk=4,reach=32", "3d-rpe"),
        ("near", "3d-rpe"),
        ("plain", "yarn"),
        ("own", "3d-rpe-definition"),
    ]
    assert parse_laws(text)[1].parameters == {"reach": 16, "focus": 0}


@pytest.mark.parametrize("text", ["1_0", "\u0661", "\uff11"])  # 10, and 1 in other digits, to Python's int
def test_numbers_are_written_in_plain_digits(text):
    assert parse_law(f"3d-rpe:chunk={text}").parameters == {"chunk": text}


def test_a_law_is_not_called_by_the_name_of_another():
    with pytest.raises(ConfigError, match="3d-rpe cannot be called yarn: that is another law: choose another name"):
        parse_law("yarn=3d-rpe:chunk=4")
    assert parse_law("3d-rpe=3d-rpe:chunk=4").label == "3d-rpe"


def test_a_law_file_may_have_a_short_name_and_keeps_what_it_was_made_for(tmp_path):
    law = make_law("3d-rpe", context=256, reach=32, focus=0, fade=0, **MODEL)
    (tmp_path / "law.json").write_text(law.json)
    for spec, label in ((read_law(tmp_path / "law.json"), "law"), (parse_law(f"my={tmp_path}/law.json"), "my")):
        assert (spec.label, spec.pretrained, spec.context) == (label, 64, 256)
        assert spec.at(256, MODEL) == law


def test_a_law_file_from_before_fading_is_a_law_without_it(tmp_path):
    law = make_law("3d-rpe", context=256, reach=32, focus=0, fade=0, **MODEL)
    old = {name: value for name, value in law.to_dict().items() if name not in ("focus", "fade", "sinks")}
    (tmp_path / "law.json").write_text(json.dumps(old))
    assert read_law(tmp_path / "law.json").at(256, MODEL) == law
