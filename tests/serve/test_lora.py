"""LoRA adapters on a model under a law: as transformers with PEFT, and none that was trained under another law."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-serve` has it")
pytest.importorskip("peft", reason="PEFT is not installed")

import peft
from engines import TARGETS, answers, assert_as_transformers, engine, model, prompts, train

from rpe3d import ConfigError
from rpe3d.models.adapters import save_adapter


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A trained model, its adapter, and an engine that serves the base with adapters."""
    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("adapter")
    model(law="3d-rpe").save_pretrained(base)
    trained = train(model(law="3d-rpe"))
    save_adapter(trained, folder)
    return trained, folder, engine(base, enable_lora=True, max_lora_rank=8, max_loras=2)


def request(folder, number=1):
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter {number}", number, str(folder))


def test_an_adapter_s_answers_are_those_of_peft(adapted):
    """With and without the adapter, in one engine, across the law's edge, again from the prefix cache."""
    trained, folder, llm = adapted
    texts = prompts(1, 24, 25, 65, 150, 301)
    with trained.disable_adapter():
        assert_as_transformers(trained, texts, answers(llm, texts))
    for _ in range(2):
        given = answers(llm, texts, lora_request=request(folder))
        assert_as_transformers(trained, texts, given)
    with pytest.raises(AssertionError), trained.disable_adapter():
        assert_as_transformers(trained, texts, given)


@pytest.mark.parametrize(
    ("law", "parameters", "words"),
    [("3d-rpe", {"chunk": 8}, "differ in chunk"), ("dca", {}, "the adapter's law and the base's differ in name")],
)
def test_an_adapter_of_another_law_is_refused(adapted, tmp_path, law, parameters, words):
    trained, folder, llm = adapted
    other = peft.get_peft_model(model(law=law, **parameters), peft.LoraConfig(r=8, target_modules=TARGETS))
    save_adapter(other, tmp_path)
    with pytest.raises(ConfigError, match=words):
        llm.llm_engine.add_lora(request(tmp_path, 2))
    texts = prompts(30)
    assert_as_transformers(trained, texts, answers(llm, texts, lora_request=request(folder)))


def test_an_adapter_that_was_trained_without_a_law_is_served(adapted, tmp_path):
    """PEFT lets it, and a law that needs no training is made for such weights."""
    _, _, llm = adapted
    plain = train(model())
    plain.save_pretrained(tmp_path)
    under = peft.PeftModel.from_pretrained(model(law="3d-rpe"), tmp_path).eval()
    texts = prompts(1, 25, 150)
    assert_as_transformers(under, texts, answers(llm, texts, lora_request=request(tmp_path, 3)))


def test_a_base_without_the_adapter_s_law_is_refused(adapted, tmp_path):
    """Last: the shared engine ends with any other."""
    _, folder, _ = adapted
    model().save_pretrained(tmp_path)
    llm = engine(tmp_path, enable_lora=True, max_lora_rank=8)
    with pytest.raises(ConfigError, match="trained under 3d-rpe, but this base is not under a law"):
        llm.llm_engine.add_lora(request(folder))
