"""One law from `extend` to the layers: taken as it is, made once, and read by everyone from the config."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

import rpe3d
from rpe3d import ConfigError, make_law
from rpe3d.geometry import Law
from rpe3d.models import as_stock, facts, pretrained_length
from rpe3d.models.carried import Carried, module_law

BOUNDED = {"chunk": 8, "window": 16, "reach": 32, "focus": 0, "fade": 0}
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def made(monkeypatch):
    """Every law that is made, in order."""
    laws = []
    check = Law.__post_init__

    def noted(self):
        check(self)
        laws.append(self)

    monkeypatch.setattr(Law, "__post_init__", noted)
    return laws


def attentions(model):
    return [layer.self_attn for layer in model.model.layers]


@pytest.mark.parametrize("name", rpe3d.laws())
def test_a_law_is_taken_as_it_is_and_does_what_its_name_does(tiny, ids, name):
    own = {"context": 124, "shift": 64} if name == "string" else {"context": 256}
    named = rpe3d.extend(tiny(), name, **own)
    model = tiny()
    law = make_law(name, **facts(model), **own)
    assert rpe3d.extend(model, law) is model
    assert rpe3d.law_of(model) is law
    assert law == rpe3d.law_of(named)
    assert model.config.to_dict() == named.config.to_dict()
    assert torch.equal(model(ids).logits, named(ids).logits)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"pretrained": 128}, "pretrained is 128, but this model's is 64"),
        ({"head_dim": 32, "rotary_dim": 16}, "head_dim is 32, but this model's is 16"),
        ({"rope_theta": 5e5, "interleaved": True}, "rope_theta is 500000.0, but this model's is 10000.0"),
        ({"rotary_dim": 8}, "rotary_dim is 8, but this model's is 16"),
        ({"interleaved": True}, "interleaved is True, but this model's is False"),
        ({"rope_scaling": LINEAR}, "rope_scaling is {'rope_type': 'linear', 'factor': 2.0}, but this model's is None"),
    ],
)
def test_a_law_for_another_model_is_refused_by_the_first_difference(tiny, ids, other, message):
    model = tiny()
    before, config = model(ids).logits, model.config.to_dict()
    with pytest.raises(ConfigError, match=message) as caught:
        rpe3d.extend(model, make_law("3d-rpe", context=256, **facts(model) | other))
    assert "\n" not in str(caught.value)
    assert torch.equal(model(ids).logits, before)
    assert model.config.to_dict() == config


@pytest.mark.parametrize("given", [{"context": 256}, {"chunk": 8}, {"context": 256, "chunk": 8}])
def test_a_law_has_its_own_context_and_parameters(tiny, given):
    model = tiny()
    law = make_law("3d-rpe", context=256, **facts(model))
    with pytest.raises(ConfigError, match=f"{next(iter(given))} is given together with a finished law"):
        rpe3d.extend(model, law, **given)
    assert rpe3d.law_of(model) is None


def test_a_law_is_taken_as_text_with_its_parameters_and_from_a_file(tiny, tmp_path):
    """What `--law` takes, `extend` takes; a keyword overrides the text, and a file has a context of its own."""
    law = make_law("3d-rpe", context=256, chunk=8, reach=48, **facts(tiny()))
    (tmp_path / "law.json").write_text(law.json)
    for given, more in (
        ("3d-rpe:chunk=8,reach=48", {"context": 256}),
        ("3d-rpe:chunk=4,reach=48", {"context": 256, "chunk": 8}),
        (str(tmp_path / "law.json"), {}),
        (tmp_path / "law.json", {}),
        (tmp_path / "law.json", {"context": 256}),
    ):
        assert rpe3d.law_of(rpe3d.extend(tiny(), given, **more)) == law
    longer = rpe3d.law_of(rpe3d.extend(tiny(), tmp_path / "law.json", context=512))
    assert (longer.context, longer.reach) == (512, 48)
    other = make_law("3d-rpe", context=256, **facts(tiny()) | {"pretrained": 128})
    (tmp_path / "other.json").write_text(other.json)
    model = tiny()
    with pytest.raises(ConfigError, match="other was made for a model of 128 positions, but this one has 64"):
        rpe3d.extend(model, tmp_path / "other.json")
    with pytest.raises(ConfigError, match="'chunk' in '3d-rpe:chunk' has no value"):
        rpe3d.extend(model, "3d-rpe:chunk", context=256)
    assert rpe3d.law_of(model) is None


@pytest.mark.parametrize("law", [None, 3, {"name": "3d-rpe"}, type(make_law("rope", pretrained=64, head_dim=16))])
def test_what_is_no_law_is_refused(tiny, law):
    """A dict or a class comes from someone who holds a law in another form: the message names the forms."""
    model = tiny()
    with pytest.raises(ConfigError, match="which is not a Law, a str or a Path"):
        rpe3d.extend(model, law, context=256)
    assert rpe3d.law_of(model) is None


def test_a_checkpoint_from_before_fading_loads_as_the_law_that_it_was(tiny, tmp_path):
    """Its config names neither focus nor fade; its far keys weighed what they weighed."""
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    law = rpe3d.law_of(model)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("focus", "fade", "sinks"):
        del config["rope_parameters"]["law"][name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert rpe3d.law_of(type(model).from_pretrained(tmp_path)) == law


def test_a_law_by_its_name_needs_a_context(tiny):
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'context'"):
        rpe3d.extend(tiny(), "yarn")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_extend_makes_one_law_which_all_layers_and_readers_share(tiny, ids, family, made):
    """Two and one more for every layer, before; what is kept for a law is found by its identity."""
    model = rpe3d.extend(tiny(family), context=256, **BOUNDED)
    model(ids)
    (law,) = made
    assert rpe3d.law_of(model) is law
    assert all(module_law(layer) is law for layer in attentions(model))
    rpe3d.extend(model, law)
    assert made == [law]


def test_layers_without_rotation_share_one_law_that_never_turns(tiny, ids, made):
    model = rpe3d.extend(tiny("smollm3"), context=256, **BOUNDED)
    model(ids)
    laws = [module_law(layer) for layer in attentions(model)]
    assert {law.name for law in laws} == {"3d-rpe", "rope"}
    assert len({id(law) for law in laws}) == len(made) == 2


def test_a_loaded_model_makes_its_own_law_once(tiny, ids, tmp_path, made):
    from transformers import AutoModelForCausalLM

    first = rpe3d.extend(tiny(), context=256, **BOUNDED)
    first.save_pretrained(tmp_path)
    second = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    second(ids)
    assert rpe3d.law_of(second) == rpe3d.law_of(first)
    assert rpe3d.law_of(second) is not rpe3d.law_of(first)
    assert len(made) == 2


def test_a_copy_is_a_config_of_its_own(tiny, ids):
    """Changed in place, it has another law, and the model that it was copied from keeps its own."""
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    law, expected = rpe3d.law_of(model), model(ids).logits
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids).logits, expected)
    twin.config.rope_parameters["law"]["reach"] = 48
    assert rpe3d.law_of(twin).reach == 48
    assert all(module_law(layer).reach == 48 for layer in attentions(twin))
    assert not torch.equal(twin(ids).logits, expected)
    assert rpe3d.law_of(model) is law
    assert torch.equal(model(ids).logits, expected)
    again = copy.deepcopy(twin.config)
    again.rope_parameters["law"]["reach"] = 40
    assert type(model)(again).config.rope_parameters.law.reach == 40


def test_what_a_config_carries_is_a_plain_dict_to_json_and_pickle(tiny):
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    carried = model.config.rope_parameters
    assert type(carried) is Carried
    assert json.loads(json.dumps(carried)) == carried
    sent = pickle.loads(pickle.dumps(carried))
    assert type(sent) is dict
    assert sent == carried


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "glm"])
def test_facts_are_what_make_law_takes_whatever_law_the_model_is_under(tiny, ids, family):
    model = tiny(family)
    before, found = model(ids).logits, facts(model)
    assert torch.equal(model(ids).logits, before)
    assert rpe3d.law_of(model) is None
    rpe3d.extend(model, "3d-rpe", context=256, **BOUNDED)
    law = rpe3d.law_of(model)
    assert facts(model) == found
    assert make_law("3d-rpe", context=256, **found, **BOUNDED) == law
    assert rpe3d.law_of(model) is law
    assert pretrained_length(model) == found["pretrained"]
    assert torch.equal(as_stock(as_stock(model))(ids).logits, before)
    assert pretrained_length(model) == found["pretrained"]
