"""lm-eval's own Hugging Face model takes an extended checkpoint: `import rpe3d` is all that it needs."""

from __future__ import annotations

import pytest
import torch

import rpe3d
import tiny_lm
from rpe3d.evaluate.likelihood import token_nll

huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval is not installed")
pytestmark = pytest.mark.filterwarnings("default")


def test_an_extended_checkpoint_is_measured_under_its_law(tmp_path):
    from lm_eval.api.instance import Instance

    folder = tiny_lm.save(tmp_path / "model", bos=True)
    model = rpe3d.extend(tiny_lm.model(), "3d-rpe", context=1024)
    model.save_pretrained(folder)
    lm = huggingface.HFLM(pretrained=str(folder), device="cpu", dtype="float32", max_length=1024, batch_size=1)
    assert rpe3d.law_of(lm.model) == rpe3d.law_of(model)
    context, end = "a word" * 100, " and an end"
    asked = Instance(request_type="loglikelihood", doc={}, arguments=(context, end), idx=0)
    ((found, _),) = lm.loglikelihood([asked], disable_tqdm=True)
    ids = torch.tensor([lm.tokenizer(context + end).input_ids])
    assert found == pytest.approx(-float(token_nll(model, ids, len(end)).sum()), rel=1e-4)
    assert found != pytest.approx(-float(token_nll(tiny_lm.model(), ids, len(end)).sum()), rel=1e-3)
