"""Devices are counted without starting CUDA: a process that has asked for them can still fork (vLLM does).

And what is on the host is there whatever the default device is: vLLM builds models with the GPU as the default.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rpe3d
import tiny_lm
from rpe3d.attention import lowering
from rpe3d.geometry import LAWS, relative_position_matrix
from rpe3d.models import devices

SOURCES = sorted(Path(rpe3d.__file__).parent.rglob("*.py"))


def test_nothing_in_the_package_asks_torch_in_the_way_that_poisons_a_fork():
    call = re.compile(r"(?:cuda|accelerator)\.is_available\(|_cuda_getDeviceCount|import is_available")
    code = {path: re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(encoding="utf-8"), flags=re.S) for path in SOURCES}
    assert [path.name for path, text in code.items() if call.search(text)] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_machine_without_a_gpu_is_told_from_one_that_has_it():
    assert not devices.has_cuda()
    assert not any(devices.present(torch.device(name)) for name in ("cuda", "cuda:1", "mps", "xpu", "meta"))
    assert devices.present(torch.device("cpu"))


def test_a_device_beyond_the_last_is_not_present(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.has_cuda()
    assert [devices.present(torch.device(f"cuda:{n}")) for n in range(3)] == [True, True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="forks a process that uses a GPU")
def test_a_process_that_has_counted_its_gpus_can_fork_one_that_uses_them():
    """The other way round it fails on CUDA: torch.cuda.is_available() in the parent, "Cannot re-initialize CUDA"."""
    script = (
        "import os, torch\nfrom rpe3d.models.devices import has_cuda\nassert has_cuda()\nchild = os.fork()\n"
        "if child == 0:\n    torch.zeros(1, device='cuda')\n    os._exit(0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == 0


NEEDS = {"longrope": {"long_factor": [1.0 + pair for pair in range(8)]}}
"""Parameters that laws do not go without, for heads of 16."""


@pytest.mark.parametrize("name", LAWS)
def test_numbers_of_a_law_are_on_the_host_whatever_the_default_device(name):
    """A tensor that ends on `meta` has no numbers, and one that meets it there fails."""

    def numbers():
        law, places = rpe3d.make_law(name, pretrained=32, context=256, head_dim=16, **NEEDS.get(name, {})), range(200)
        query = torch.tensor(places, device="cpu")[:, None]
        found = [law.frequencies(), law.relative_angles(query, 3)]
        found += [law.relative_position(query, 3)] if law.single_position else []
        return [*found, lowering.table(law, torch.device("cpu"))] if lowering.plan(law).refusal is None else found

    expected = numbers()
    with torch.device("meta"):
        found = numbers()
    for ours, truth in zip(found, expected, strict=True):
        assert ours.device.type == "cpu"
        torch.testing.assert_close(ours, truth, rtol=0, atol=0, equal_nan=True)


SCALINGS = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "longrope", "long_factor": [2.0] * 8, "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 2.0},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_the_model_s_own_frequencies_are_on_the_host_whatever_the_default_device(scaling):
    given = scaling | ({} if scaling["rope_type"] == "linear" else {"original_max_position_embeddings": 16})
    law = rpe3d.make_law("3d-rpe", pretrained=32, context=256, head_dim=16, rope_scaling=given)
    expected = law.frequencies()
    with torch.device("meta"):
        found = law.frequencies()
        matrix = relative_position_matrix(4, 9)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert matrix.nansum() > 0


@pytest.mark.parametrize(
    ("name", "parameters"), [(name, {}) for name in LAWS if name not in NEEDS] + [("3d-rpe", {"far": 2, "full": "all"})]
)
def test_a_model_is_extended_and_runs_on_the_host_whatever_the_default_device(name, parameters):
    ids = torch.randint(3, 90, (2, 450), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :20] = 0

    @torch.no_grad()
    def results(model):
        rpe3d.extend(model, name, context=512, **parameters)
        first = model(ids[:, :449], use_cache=True)
        step = model(ids[:, 449:], past_key_values=first.past_key_values)
        return model(ids, attention_mask=mask).logits, first.logits, step.logits

    one, other = tiny_lm.model(), tiny_lm.model()
    expected = results(one)
    with torch.device("meta"):
        found = results(other)
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-6)
