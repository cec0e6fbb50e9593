"""An engine that could only give wrong text does not start, and says why."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-serve` has it")

from engines import CONTEXT, engine, model
from vllm import envs

from rpe3d import ConfigError
from rpe3d.serve import rope


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("refused")
    model(law="3d-rpe").save_pretrained(made)
    return made


def refused(folder, **options):
    with pytest.raises(ConfigError) as raised:
        engine(folder, **options)
    return str(raised.value)


def test_a_length_beyond_the_law_s_context(folder, monkeypatch):
    """vLLM refuses it by itself, unless its user insists."""
    with pytest.raises(ValueError, match="max_model_len"):
        engine(folder, max_model_len=CONTEXT + 1)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    envs.disable_envs_cache()  # an engine of another test may have read the environment for good
    assert f"beyond the law's context {CONTEXT}" in refused(folder, max_model_len=CONTEXT + 1)


def test_a_cache_that_rounds_keys(folder):
    assert "the cache holds keys as fp8" in refused(folder, kv_cache_dtype="fp8", dtype="bfloat16")


def test_a_cache_of_another_type_than_the_model(folder):
    """vLLM starts, and its engine would end at the first text beyond plain RoPE."""
    words = refused(folder, kv_cache_dtype="bfloat16", dtype="float32")
    assert "the cache holds keys as bfloat16, but a law needs the model's own float32" in words


def test_another_version_of_vllm(folder, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    assert "vLLM is 0.33.1, but laws are tested on a CPU only with 0.28, " in refused(folder)


def test_a_law_whose_attention_is_not_there(folder, monkeypatch):
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import registry

    selector._cached_get_attn_backend.cache_clear()
    monkeypatch.delitem(registry._ATTN_OVERRIDES, registry.AttentionBackendEnum.CPU_ATTN)
    assert "3d-rpe needs the attention backend of rpe3d, but vLLM runs CPU_ATTN" in refused(folder)
    selector._cached_get_attn_backend.cache_clear()


def test_attention_under_a_law_whose_rotary_layer_is_not_there(folder, monkeypatch):
    class Forgetful(set):
        def add(self, _):
            pass

    monkeypatch.setattr(rope, "MADE", Forgetful())
    monkeypatch.setattr("rpe3d.serve.backend.MADE", Forgetful())
    assert "the model's rotary layer was not made by rpe3d" in refused(folder)


def test_a_family_that_is_not_tested(tmp_path):
    model("granite", law="3d-rpe").save_pretrained(tmp_path)
    assert "models of type 'granite' are not served" in refused(tmp_path)


def test_a_law_that_changes_with_the_length_of_the_text(tmp_path):
    model(law="dynamic").save_pretrained(tmp_path)
    assert "dynamic changes its frequencies" in refused(tmp_path)


def apart(folder, options="", **environment):
    """Return the exit status of an engine in a process of its own, and what it said."""
    line = f"from engines import engine; import sys; engine(sys.argv[1], {options})"
    path = os.pathsep.join(filter(None, (os.path.dirname(__file__), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path} | environment
    command = [sys.executable, "-c", line, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


def test_vllm_without_the_plugin_refuses_the_checkpoint(folder):
    """It stops where it would make the rotary layer, of a type that it does not know. The plugin alone is missing."""
    status, words = apart(folder, VLLM_PLUGINS="none")
    assert status != 0
    deepest = [line for line in words.splitlines() if 'File "' in line][-1]
    assert "rotary_embedding" in deepest
    assert deepest.endswith("in get_rope")
    status, words = apart(folder, VLLM_PLUGINS="rpe3d")
    assert status == 0, words


def test_a_model_that_vllm_takes_from_transformers(folder):
    """There the rotary layer is transformers'. In a process of its own: vLLM changes transformers for all models."""
    status, words = apart(folder, 'model_impl="transformers"')
    assert status != 0
    assert "rotary layer was not made by rpe3d" in words or "no other way to handle it" in words
