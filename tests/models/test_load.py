"""Loading a model by name: what works, and the one sentence for everything that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from checkpoints import SIZES, refused, same_weights
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

import rpe3d
import tiny_lm
from rpe3d.config import ConfigError
from rpe3d.models import failures
from rpe3d.models import load as module
from rpe3d.models.load import load

pytestmark = pytest.mark.usefixtures("cache")


def test_importing_the_module_imports_no_transformers():
    """A verb loads what it needs when it runs."""
    code = "import sys, rpe3d.models.load; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_folder_loads_bit_for_bit_with_its_tokenizer(folder, llama):
    loaded = load(str(folder), device="cpu")
    assert same_weights(loaded.model, llama)
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert loaded.tokenizer("abab").input_ids == [5, 5]
    assert (loaded.source, loaded.notes) == (str(folder), ())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_folder_loads_in_the_dtype_asked_for(folder, dtype):
    assert load(str(folder), dtype=dtype, device="cpu").model.dtype == dtype


def test_a_model_without_a_tokenizer_loads_only_when_none_is_asked_for(tmp_path, llama):
    llama.save_pretrained(tmp_path / "bare")
    assert load(str(tmp_path / "bare"), with_tokenizer=False).tokenizer is None
    with pytest.raises(ConfigError, match=r"has no tokenizer that loads .*: add its tokenizer.json"):
        load(str(tmp_path / "bare"))


@pytest.mark.parametrize("keep", [0.5, 0.01, 0.0])
def test_weights_that_are_cut_short_are_named(folder, keep):
    weights = folder / "model.safetensors"
    os.truncate(weights, int(weights.stat().st_size * keep))
    assert f"{weights} is damaged or cut short" in refused(folder)


def test_a_damaged_shard_among_sound_ones_is_named(tmp_path, llama):
    llama.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    last = sorted((tmp_path / "shards").glob("*.safetensors"))[-1]
    os.truncate(last, 100)
    assert f"{last} is damaged" in refused(tmp_path / "shards", with_tokenizer=False)


def test_a_git_lfs_pointer_is_recognised(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refused(folder)


def test_a_missing_shard_is_refused(tmp_path, llama):
    llama.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    last = sorted((tmp_path / "shards").glob("*.safetensors"))[-1]
    last.unlink()
    refused(tmp_path / "shards", with_tokenizer=False)


def test_a_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    assert f"the folder {folder} has no config.json" in refused(folder)


def test_a_folder_with_only_a_gguf_points_to_the_file(tmp_path, gguf):
    assert f"pass the file itself, {gguf}" in refused(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "no-such-model"}', '{"model_type": 5}', "\0"])
def test_a_config_that_makes_no_sense_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    assert str(folder) in refused(folder)


def test_a_pickle_is_never_opened(folder, llama):
    (folder / "model.safetensors").unlink()
    torch.save(llama.state_dict(), folder / "pytorch_model.bin")
    assert "convert them to safetensors" in refused(folder)


def test_a_pickle_beside_other_safetensors_is_never_opened(folder, llama):
    """`use_safetensors=True` holds where the folder's look alone would not tell."""
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    torch.save(llama.state_dict(), folder / "pytorch_model.bin")
    refused(folder)


def test_a_checkpoint_that_lacks_weights_is_refused_rather_than_filled_with_noise(tmp_path, llama):
    LlamaModel(llama.config).save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base/config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    assert "lack lm_head.weight" in refused(tmp_path / "base", with_tokenizer=False)


@pytest.mark.parametrize(
    "model",
    [
        lambda: BertForMaskedLM(BertConfig(**SIZES)),
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=6, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2)
        ),
        lambda: BartForConditionalGeneration(
            BartConfig(vocab_size=6, d_model=16, encoder_layers=1, decoder_layers=1, pad_token_id=0)
        ),
        lambda: LlamaModel(LlamaConfig(**SIZES)),
    ],
    ids=["bert", "t5", "bart", "llama without head"],
)
def test_what_is_not_a_causal_language_model_is_refused(tmp_path, model):
    """transformers itself loads the first and the last, and only warns."""
    model().save_pretrained(tmp_path / "other")
    assert "is not a causal language model but" in refused(tmp_path / "other", with_tokenizer=False)


@pytest.mark.parametrize("model_type", ["llama-like", "llama"])
def test_code_of_a_repository_runs_only_when_asked(folder, tmp_path, model_type):
    """With a known model type the library's own code is used, and the repository's stays unread."""
    ran = tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text()) | {"model_type": model_type}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    if model_type == "llama":
        load(str(folder))
    else:
        assert "--trust-remote-code" in refused(folder)
    assert not ran.exists()


def test_a_hub_name_without_a_hub_says_what_else_to_give():
    message = refused("nobody/no-such-model")
    assert "there is no folder nobody/no-such-model, and the hub did not serve it" in message
    assert "pass a folder, a .gguf file or `default`" in message


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "nothing.gguf", "not a name", "~nobody/x", "a" * 5000])
def test_a_name_that_stands_for_nothing_is_refused(name):
    refused(name)


def test_a_device_or_dtype_that_cannot_be_had_is_refused(folder):
    assert "device 'gpu'" in refused(folder, device="gpu")
    for device in ("cuda:99", "meta") + (() if torch.backends.mps.is_available() else ("mps",)):
        assert f"device {device} is not on this machine" in refused(folder, device=device)
    assert "torch.int8" in refused(folder, dtype=torch.int8)


def test_a_device_that_fails_is_not_taken_for_a_damaged_model(folder, monkeypatch):
    from transformers import LlamaForCausalLM

    def broken(self, place):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(LlamaForCausalLM, "to", broken)
    message = refused(folder, device="cpu")
    assert f"cannot put {folder} on cpu (OutOfMemoryError CUDA out of memory" in message
    assert "copy it again" not in message


def test_a_gpu_is_used_where_there_is_one_and_in_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert module._placement(None, None) == (torch.device("cuda"), torch.bfloat16)
    assert module._placement("cuda:1", torch.float32) == (torch.device("cuda:1"), torch.float32)
    assert module._placement("cpu", None) == (torch.device("cpu"), torch.float32)


def test_a_missing_extra_is_named(folder, monkeypatch):
    monkeypatch.setattr(failures, "find_spec", lambda name: None)
    assert "pip install 'rpe3d[models]'" in refused(folder)


# LongChat's config says `rope_condense_ratio`. FastChat's patch of the rotary embedding reads it (t = arange / ratio),
# and transformers does not.
RATIO = 8


def condensed(model):
    """FastChat's condensed rotary: every position divided, by hand, on a stock Llama."""
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids, **kwargs: forward(x, position_ids / RATIO, **kwargs)
    return model


@pytest.fixture
def longchat(tmp_path):
    config = LlamaConfig(vocab_size=257, **tiny_lm.SIZES, rope_condense_ratio=RATIO)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "longchat")
    return tmp_path / "longchat"


@torch.no_grad()
def test_longchats_positions_are_divided_as_fastchat_does(longchat):
    loaded = load(str(longchat), device="cpu", with_tokenizer=False)
    assert loaded.notes == ("its positions are divided by 8, as `rope_condense_ratio` in its config says",)
    stock = AutoModelForCausalLM.from_pretrained(longchat)
    ids = torch.arange(1, 200)[None]
    plain = stock(ids).logits
    assert torch.allclose(loaded.model(ids).logits, condensed(stock)(ids).logits, atol=1e-4)
    assert not torch.allclose(loaded.model(ids).logits, plain, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("law", ["3d-rpe", "linear"])
def test_a_law_stands_on_longchats_positions_and_they_are_divided_once(longchat, tmp_path, law):
    model = load(str(longchat), device="cpu", with_tokenizer=False).model
    ids = torch.arange(1, 60)[None]  # within the window of 3d-rpe
    stock, frequencies = model(ids).logits, model.model.rotary_emb.inv_freq.clone()
    rpe3d.extend(model, law, context=1024)
    assert rpe3d.law_of(model).pretrained == tiny_lm.SIZES["max_position_embeddings"]
    factor = 4 if law == "linear" else 1
    assert torch.allclose(model.model.rotary_emb.inv_freq, frequencies / factor)
    assert torch.allclose(model(ids).logits, stock, atol=1e-4) == (law == "3d-rpe")
    model.save_pretrained(tmp_path / "extended")
    again = load(str(tmp_path / "extended"), device="cpu", with_tokenizer=False)
    assert again.notes == ()
    assert torch.equal(again.model(ids).logits, model(ids).logits)
    assert torch.equal(rpe3d.restore(again.model)(ids).logits, stock)


@pytest.mark.parametrize("law", ["ntk", "dynamic", "yarn", "longrope"])
def test_laws_that_rebuild_the_frequencies_refuse_longchat(longchat, law):
    model = load(str(longchat), device="cpu", with_tokenizer=False).model
    with pytest.raises(ConfigError, match="'linear' scaling"):
        rpe3d.extend(model, law, context=1024)
