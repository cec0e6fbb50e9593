"""A model under a law for measuring: what it reads depends on no text that was read before."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

from rpe3d.evaluate.under import growing, under
from rpe3d.geometry import make_law
from rpe3d.models import facts
from tiny_models import make

pytestmark = pytest.mark.usefixtures("one_thread")
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def drawn(seed, count):
    return torch.randint(3, 97, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [40, 64, 100])  # below the pretrained length, at it, and beyond it
@pytest.mark.parametrize(
    ("family", "name", "parameters"),
    [
        ("llama", "dynamic", {}),
        ("llama", "longrope", {"long_factor": [2.0] * 8}),
        ("gemma3_text", "dynamic", {}),
        ("llama", None, {"rope_parameters": DYNAMIC}),
    ],
)
def test_a_text_is_read_the_same_after_a_longer_one(family, name, parameters, length):
    """transformers keeps the frequencies of the longest text. The oracle is a model that has read nothing."""

    def fresh():
        model = make(family, **parameters if name is None else {})
        return model, name and make_law(name, context=512, **facts(model), **parameters)

    text, longer = drawn(1, length), drawn(2, 300)
    with torch.no_grad():
        model, law = fresh()
        with under(model, law):
            wanted = model(text).logits
        model, law = fresh()
        with under(model, law):
            assert growing(model)
            other = model(longer).logits[:, :length]
            cache = DynamicCache(config=model.config)
            model(text[:, :-1], past_key_values=cache)
            model(text[:, -1:], past_key_values=cache)  # a step does not begin a text
            assert torch.equal(model(text).logits, wanted)
    assert not torch.allclose(other, wanted, atol=1e-2)
    assert not model._forward_pre_hooks


def test_an_adapted_model_reads_and_writes_the_same_after_a_longer_text():
    """PEFT's `generate` calls the base, its forward in older versions the adapted model alone."""
    model = get_peft_model(make(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).eval()
    text, longer = drawn(1, 80), drawn(2, 300)

    def written():
        return model.generate(input_ids=text, max_new_tokens=8, do_sample=False)

    with torch.no_grad(), under(model, make_law("dynamic", context=512, **facts(model))):
        wanted, logits = written(), model(text).logits
        model(longer)
        assert torch.equal(written(), wanted)
        model(longer)
        assert torch.equal(model(text).logits, logits)
    assert not model._forward_pre_hooks
    assert not model.get_base_model()._forward_pre_hooks
