"""Quantised weights load, extend and are restored: a law changes positions, and no layer's weights are looked at."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig

import rpe3d
from rpe3d import ConfigError
from rpe3d.cli import main
from rpe3d.models.load import load
from tiny_models import make

LAW = {"context": 512, "chunk": 8, "window": 16, "reach": 32}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries that quantise


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Tiny models."""


def needs(package):
    parts = package.split(".")
    missing = any(importlib.util.find_spec(".".join(parts[: n + 1])) is None for n in range(len(parts)))
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def check(model, ids, close):
    """Short texts stay, long ones change, decoding is one forward, and the stock model comes back."""
    stock, short = logits(model, ids), logits(model, ids[:, :24])
    rpe3d.extend(model, **LAW)
    extended = logits(model, ids)
    torch.testing.assert_close(logits(model, ids[:, :24]), short, atol=1e-3, rtol=0)
    assert (extended - stock).abs().max() > 1
    with torch.no_grad():
        cache = model(ids[:, :100], use_cache=True).past_key_values
        step = model(ids[:, 100:101], past_key_values=cache).logits[:, 0]
    assert (step - extended[:, 100]).abs().max() < close
    rpe3d.restore(model)
    assert torch.equal(logits(model, ids), stock)


@pytest.fixture
def base(tmp_path):
    make(**SIZES).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize(
    ("quantise", "close"),
    [
        pytest.param(lambda: BitsAndBytesConfig(**FOUR_BITS), 1e-3, marks=needs("bitsandbytes"), id="bnb-4-bits"),
        # 8 bits round the activations of a whole text together, so one token is another sum than in its text
        pytest.param(lambda: BitsAndBytesConfig(load_in_8bit=True), 1.0, marks=needs("bitsandbytes"), id="bnb-8-bits"),
        pytest.param(lambda: QuantoConfig(weights="int8"), 1e-3, marks=needs("optimum.quanto"), id="quanto"),
    ],
)
def test_weights_that_are_quantised_on_loading(base, ids, quantise, close):
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantise(), device_map="cpu").eval()
    check(model, ids, close)


@needs("bitsandbytes")
def test_a_quantised_checkpoint_is_extended_by_copying_it(base, ids, tmp_path, capsys):
    """transformers cannot save what it loaded quantised; the command copies the weights byte for byte."""
    config = BitsAndBytesConfig(**FOUR_BITS)
    AutoModelForCausalLM.from_pretrained(base, quantization_config=config, device_map="cpu").save_pretrained(
        tmp_path / "four"
    )
    loaded = load(str(tmp_path / "four"), with_tokenizer=False, device="cpu").model
    check(loaded, ids, 1e-3)
    sizes = ["--chunk", "8", "--window", "16", "--reach", "32"]
    assert main(["extend", str(tmp_path / "four"), "--context", "512", *sizes, "--out", str(tmp_path / "long")]) == 0
    again = load(str(tmp_path / "long"), with_tokenizer=False, device="cpu").model
    assert rpe3d.law_of(again).context == 512
    torch.testing.assert_close(logits(again, ids), logits(rpe3d.extend(loaded, **LAW), ids), atol=1e-3, rtol=0)


@needs("compressed_tensors")
def test_compressed_tensors(tmp_path, ids):
    """8 bits with a scale per channel, written by the library itself."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    model = make(**SIZES)
    weights = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    config = QuantizationConfig(
        config_groups={"all": QuantizationScheme(targets=["Linear"], weights=weights)},
        ignore=["lm_head"],
        format="int-quantized",
        quantization_status="frozen",
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data.copy_(module.weight.abs().amax(1, keepdim=True) / 127)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    loaded = load(str(tmp_path), with_tokenizer=False, device="cpu").model
    check(loaded, ids, 1e-3)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_missing_library_is_named(base):
    """transformers raises an ImportError of many lines: the user needs the name of the package."""
    file = base / "config.json"
    content = json.loads(file.read_text())
    file.write_text(
        json.dumps(content | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    )
    with pytest.raises(ConfigError, match=r"without another package .*bitsandbytes.*install the package it names"):
        load(str(base), with_tokenizer=False, device="cpu")
