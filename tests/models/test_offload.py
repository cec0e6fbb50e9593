"""Models whose weights accelerate keeps elsewhere, and brings to a device for a forward, take a law like any other."""

from __future__ import annotations

import pytest
import torch

import rpe3d
from rpe3d.models import law_of

LAW = {"context": 512, "chunk": 8, "window": 16, "reach": 32, "focus": 0, "fade": 0}


def to_cpu(model, folder):
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


def to_cpu_with_buffers(model, folder):
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)


def to_disk(model, folder):
    from accelerate import disk_offload

    return disk_offload(model, folder, execution_device=torch.device("cpu"))


def in_part(model, folder):
    """The first layer stays, the embeddings and the second go to disk."""
    from accelerate import dispatch_model

    places = {"model.embed_tokens": "disk", "model.rotary_emb": "cpu", "model.layers.0": "cpu"}
    places |= {"model.layers.1": "disk", "model.norm": "cpu", "lm_head": "disk"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


@pytest.mark.parametrize("away", [to_cpu, to_cpu_with_buffers, to_disk, in_part])
def test_an_offloaded_model_is_extended_and_restored_and_writes_what_it_would_in_memory(tiny, tmp_path, away):
    near, far = tiny(), away(tiny(), tmp_path / "weights")
    ids = torch.randint(1, 97, (1, 100))
    stock = near.generate(ids, max_new_tokens=8, do_sample=False)
    rpe3d.extend(near, **LAW)
    rpe3d.extend(far, **LAW)
    assert law_of(far) == law_of(near)
    for length in (20, 100):
        short = ids[:, :length]
        made = [m.generate(short, max_new_tokens=8, do_sample=False) for m in (near, far)]
        assert torch.equal(*made)
        assert torch.equal(near(short).logits, far(short).logits)
    assert torch.equal(rpe3d.restore(far).generate(ids, max_new_tokens=8, do_sample=False), stock)
    rpe3d.extend(far, "yarn", context=512)  # a law that changes frequencies alone
    assert torch.equal(far(ids).logits, rpe3d.extend(near, "yarn", context=512)(ids).logits)
