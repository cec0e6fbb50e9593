"""Other people's long-context checkpoints are measured with the rope settings that they came with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tiny_lm
from rpe3d.config import ConfigError
from rpe3d.evaluate.evaluation import evaluate
from rpe3d.evaluate.settings import Ask
from rpe3d.evaluate.tasks.chat import called, chat_of
from rpe3d.evaluate.under import own_length
from rpe3d.models.load import load

# Both divide positions. Vicuna 16k says so in the words of transformers; LongChat in FastChat's, which `load` reads.
CONFIGS = {
    "longchat-7b-16k": {"rope_condense_ratio": 8, "max_sequence_length": 512},
    "vicuna-7b-v1.5-16k": {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": 256},
}
RATIOS = {"longchat-7b-16k": 8.0, "vicuna-7b-v1.5-16k": 4.0}


@pytest.fixture(params=CONFIGS)
def checkpoint(request, tmp_path):
    torch.manual_seed(0)
    sizes = {**tiny_lm.SIZES, "max_position_embeddings": 64}
    config = LlamaConfig(vocab_size=257, **sizes, **CONFIGS[request.param])
    LlamaForCausalLM(config).save_pretrained(tmp_path / request.param)
    tiny_lm.tokenizer().save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


def test_they_are_rows_in_vicunas_chat_with_their_own_rope_settings(checkpoint):
    loaded = load(str(checkpoint), device="cpu")
    assert own_length(loaded.model) == 64 * RATIOS[checkpoint.name]
    chat, note = chat_of("auto", loaded.tokenizer, checkpoint.name)
    assert (chat.form, note) == ("vicuna", None)
    results = evaluate(loaded.model, chat, Ask(tasks=[("passkey", "")], lengths=[512], passkeys=1), data={}, texts={})
    (row,) = results["rows"]
    assert (row["law"], row["status"], row["n"]) == ("stock", "ok", 1)
    rope = results["model"]["rope"]
    assert (rope["rope_type"], rope["factor"]) == ("linear", RATIOS[checkpoint.name])


def test_a_model_that_does_not_say_its_context_needs_a_length():
    config = SimpleNamespace()
    config.get_text_config = lambda decoder: config
    with pytest.raises(ConfigError, match="SimpleNamespace does not say how long its context is: pass --length"):
        own_length(SimpleNamespace(config=config))
    config.seq_length = 32768  # as ChatGLM says it
    assert own_length(SimpleNamespace(config=config)) == 32768


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("Llama-2-7b-chat-hf", "llama2"),
        ("vicuna-7b-v1.5-16k", "vicuna"),
        ("xgen-7b-8k-inst", "xgen"),
        ("internlm-chat-7b", "internlm"),
        ("Llama-2-7b-hf", "none"),
        ("something-else", "none"),
    ],
)
def test_the_chat_goes_by_the_models_name_as_upstream_has_it(tokenizer, name, form):
    chat, note = chat_of("auto", tokenizer, name)
    assert chat.form == form
    assert (note is None) == (form != "none")


def test_a_model_is_called_by_its_own_name(tmp_path, monkeypatch):
    snapshot = (
        tmp_path / "models--meta-llama--Llama-2-7b-chat-hf" / "snapshots" / "f5db02db724555f92da89c216ac04704f23d4590"
    )
    snapshot.mkdir(parents=True)
    (tmp_path / "link").symlink_to(snapshot)
    for given in (snapshot, tmp_path / "link", "meta-llama/Llama-2-7b-chat-hf"):
        assert called(str(given)) == "Llama-2-7b-chat-hf"
    monkeypatch.chdir(tmp_path)
    assert called(".") == tmp_path.name
    assert called("some/vicuna-7b.gguf") == "vicuna-7b.gguf"


def test_a_template_of_its_own_is_used_and_a_missing_one_is_said(tokenizer):
    with pytest.raises(ConfigError, match="something has no chat template: choose another --chat: none, llama2"):
        chat_of("template", tokenizer, "something")
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert chat_of("auto", tokenizer, "something")[0].form == "template"


def test_what_xgen_and_internlm_put_around_an_answer_is_taken_off(tokenizer):
    assert chat_of("xgen", tokenizer, "x")[0].cleaned(" Assistant: yes ") == " yes"
    assert chat_of("internlm", tokenizer, "x")[0].cleaned("yes<eoa>no") == "yes"
    assert chat_of("none", tokenizer, "x")[0].cleaned(" yes") == " yes"
