"""Layers that see all far keys beside those they choose: each layer runs under its own law, whatever the cache."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

import rpe3d
from rpe3d import ConfigError, extend, law_of, make_law
from rpe3d.attention import attention
from rpe3d.train.attention import TrainingAttention, training_attention
from tiny_models import make

FAR = {"chunk": 8, "window": 16, "reach": 48}
CHOSEN = FAR | {"far": 3, "block": 4}
FACTS = {"pretrained": 64, "context": 512, "head_dim": 16}
CHOOSES = make_law("3d-rpe", **FACTS, **CHOSEN)
FULL = make_law("3d-rpe", **FACTS, **CHOSEN, full="all")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 97, (2, 160), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    return extend(make(num_hidden_layers=4), context=512, **CHOSEN, full="1+3").double()


def logits(model, ids, **given):
    with torch.no_grad():
        return model(ids, **given).logits


@pytest.fixture
def by_layer():
    """A model whose layers run the specification under the laws of a dict, without anything of `rpe3d.models`."""

    def made(laws):
        def attend(module, q, k, v, mask, scaling=None, **_):
            out, _ = attention(q, k, v, laws[module.layer_idx], rotated=True, scale=scaling, impl="reference")
            return out.transpose(1, 2), None

        AttentionInterface.register("by-layer", attend)
        AttentionMaskInterface.register("by-layer", lambda *_, **__: None)
        model = make(num_hidden_layers=4).double()
        model.config._attn_implementation = "by-layer"
        return model

    return made


def test_each_layer_runs_under_its_own_law(model, by_layer, ids):
    """The named layers also see all far keys, the others choose."""
    found = logits(model, ids)
    laws = {0: CHOOSES, 1: FULL, 2: CHOOSES, 3: FULL}
    torch.testing.assert_close(found, logits(by_layer(laws), ids), rtol=0, atol=1e-10)
    for wrong in ({1: CHOOSES}, {2: FULL}, {1: CHOOSES, 2: FULL}):
        assert (found - logits(by_layer(laws | wrong), ids)).abs().max() > 1e-3


def test_caches_padding_and_files_keep_the_layers(model, ids, tmp_path):
    found = logits(model, ids)
    with torch.no_grad():
        out = model(ids[:, :90])
        parts = [out.logits]
        for t in range(90, 160):
            out = model(ids[:, t : t + 1], past_key_values=out.past_key_values)
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), found, rtol=0, atol=1e-10)
    padded, mask = torch.nn.functional.pad(ids, (9, 0)), torch.ones(2, 169, dtype=torch.long)
    mask[:, :9] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    out = logits(model, padded, attention_mask=mask, position_ids=places)
    torch.testing.assert_close(out[:, 9:], found, rtol=0, atol=1e-10)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert law_of(again) == law_of(model)
    assert law_of(again).full == (1, 3)
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert torch.equal(logits(copy.deepcopy(model), ids), logits(model, ids))
    assert torch.equal(logits(rpe3d.restore(model), ids), logits(make(num_hidden_layers=4).double(), ids))


def test_all_layers_may_be_named_at_once(by_layer, ids):
    found = logits(extend(make(num_hidden_layers=4), context=512, **CHOSEN, full="all").double(), ids)
    torch.testing.assert_close(found, logits(by_layer(dict.fromkeys(range(4), FULL)), ids), rtol=0, atol=1e-10)


def test_a_compiled_model_keeps_the_layers(ids):
    model = extend(make(num_hidden_layers=2), context=512, **CHOSEN, full=1)
    found = logits(model, ids)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, ids), found, rtol=0, atol=2e-4)


def test_training_runs_each_layer_under_its_own_law(model, ids):
    """A choice has no gradients on a CPU, so without them: the outputs are those of a forward for inference."""
    found = logits(model, ids)
    with training_attention(model, TrainingAttention()):
        torch.testing.assert_close(logits(model, ids), found, rtol=0, atol=1e-10)


def test_a_part_of_a_law_is_no_law_for_a_model():
    model = make()
    with pytest.raises(ConfigError, match="the law is a FarAlone, but 3d-rpe is the name of a Bounded"):
        extend(model, make_law("3d-rpe", **rpe3d.models.facts(model), context=512, **CHOSEN, full="all").both[1])
    assert law_of(model) is None


def test_a_checkpoint_is_not_loaded_with_fewer_layers_than_its_law_names(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert law_of(type(model).from_pretrained(tmp_path)).full == (1, 3)
    with pytest.raises(ConfigError, match="law names layer 3, but the model has layers 0 to 2"):
        type(model).from_pretrained(tmp_path, num_hidden_layers=3)


@pytest.mark.parametrize(
    ("family", "full", "why"),
    [
        ("llama", 2, "the law names layer 2, but the model has layers 0 to 1: choose from 0, 1"),
        ("llama", "0+7", "the law names layer 7"),
        ("gemma3_text", "0+5", "the law names layer 0, which keeps its own attention: choose from 5"),
        ("smollm3", 3, "the law names layer 3, which keeps its own attention: choose from 0, 1, 2"),
    ],
)
def test_layers_that_no_law_reaches_are_refused(family, full, why, ids):
    model = make(family)
    before = logits(model, ids)
    with pytest.raises(ConfigError, match=why):
        extend(model, context=512, **CHOSEN, full=full)
    assert torch.equal(logits(model, ids), before)
