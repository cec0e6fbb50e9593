"""vLLM is not part of `make test`: `make test-serve` has a venv of its own for it."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # engines in this process start in seconds
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # of servers; of this process it was read with torch, so make sets it, too
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A model under 3D-RPE with all its defaults, an engine that serves its checkpoint, and the checkpoint.

    vLLM ends what its engines share when one of them is collected: once another was made, do not ask this one.
    """
    from engines import engine, model

    stock = model(law="3d-rpe")
    folder = tmp_path_factory.mktemp("served")
    stock.save_pretrained(folder)
    return stock, engine(folder), folder


@pytest.fixture(scope="module")
def configured(tmp_path_factory):
    """Return vLLM's configuration of a tiny model under a law, as an engine makes it."""
    from engines import model
    from vllm.engine.arg_utils import EngineArgs

    from rpe3d.serve import plugin

    plugin.register()

    def configure(name="3d-rpe", **parameters):
        folder = tmp_path_factory.mktemp("configured")
        model(law=name, **parameters).save_pretrained(folder)
        given = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": 32, "max_num_seqs": 8}
        return EngineArgs(model=str(folder), **given).create_engine_config()

    return configure
