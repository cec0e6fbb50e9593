"""An adapter trained under a law carries the law and refuses a base without it."""

from __future__ import annotations

import pytest
import torch

import rpe3d
from rpe3d import ConfigError
from rpe3d.models import load_adapter, save_adapter

peft = pytest.importorskip("peft")
# PEFT 0.18 looks for the config of a base without a name, and says that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file in  - will assume")
BOUNDED = {"chunk": 8, "window": 16, "reach": 32, "focus": 0, "fade": 0}


def adapted(model):
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).eval()


def test_an_adapter_comes_back_on_a_base_under_its_law(tiny, ids, tmp_path):
    model = adapted(rpe3d.extend(tiny(), context=256, **BOUNDED))
    with torch.no_grad():
        expected = model(ids).logits
        save_adapter(model, tmp_path)
        again = load_adapter(rpe3d.extend(tiny(), context=256, **BOUNDED), tmp_path).eval()
        assert torch.equal(again(ids).logits, expected)


def test_an_adapter_refuses_a_base_without_its_law(tiny, tmp_path):
    save_adapter(adapted(rpe3d.extend(tiny(), context=256, **BOUNDED)), tmp_path)
    with pytest.raises(ConfigError, match="trained under 3d-rpe, but this base is not under a law"):
        load_adapter(tiny(), tmp_path)
    with pytest.raises(ConfigError, match="differ in context"):
        load_adapter(rpe3d.extend(tiny(), context=128, **BOUNDED), tmp_path)
    for damaged in ("{", '{"schema": 1, "law": "3d-rpe"}', '{"law": {"name": "3d-rpe"}}', "[]"):
        (tmp_path / "rpe3d.json").write_text(damaged)
        with pytest.raises(ConfigError, match="is damaged"):
            load_adapter(tiny(), tmp_path)
    (tmp_path / "rpe3d.json").unlink()
    with pytest.raises(ConfigError, match="was not trained under a law"):
        load_adapter(tiny(), tmp_path)


@pytest.mark.parametrize(
    ("trained", "base", "names"),
    [
        ({}, {"far": 5}, "far, block, first"),
        ({"far": 5}, {"far": 5, "decay": 0.8}, "decay"),
        ({"far": 5}, {}, "far, block, first"),
    ],
)
def test_a_refusal_names_parameters_that_one_of_the_laws_leaves_out(tiny, tmp_path, trained, base, names):
    """A law's dict is without later parameters at their defaults: "differ in :" was all that a reviewer was told."""
    save_adapter(adapted(rpe3d.extend(tiny(), context=256, **BOUNDED, **trained)), tmp_path)
    with pytest.raises(ConfigError, match=f"differ in {names}:"):
        load_adapter(rpe3d.extend(tiny(), context=256, **BOUNDED, **base), tmp_path)


def test_an_adapter_of_a_stock_model_is_not_ours_to_save(tiny, tmp_path):
    with pytest.raises(ConfigError, match="not under a law"):
        save_adapter(adapted(tiny()), tmp_path)
    assert not list(tmp_path.iterdir())
