"""What a decoding step asks of the host on a GPU, shown on any machine: its kernel runs in Triton's interpreter."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rpe3d
from rpe3d.attention import decode

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
BOUNDED = {"chunk": 16, "window": 16, "reach": 40}


class Count(TorchDispatchMode):
    """Counts the operators that torch runs."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[function.overloadpacket.__name__] += 1
        return function(*args, **kwargs or {})


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Steps take the kernel."""
    monkeypatch.setattr(decode, "machine_refusal", lambda device: None)


@pytest.fixture
def launched(monkeypatch, as_on_a_gpu):
    """As many splits as a GPU makes; launches are counted, and nothing is computed."""
    from rpe3d.attention.decode import kernel, launch

    made = []
    monkeypatch.setattr(launch, "_processors", lambda device: 132)
    monkeypatch.setattr(launch, "split", lambda programs, keys, processors: processors // programs)
    monkeypatch.setattr(kernel._decode, "bind", lambda *given: lambda *first: made.append(first))
    return made


def operators(model, ids, mask):
    """Run a prompt, then return the operators of one step and the launches' own count apart."""
    with torch.no_grad():
        past = model(ids[:, :-1], use_cache=True).past_key_values
        with Count() as count:
            model(ids[:, -1:], past_key_values=past, attention_mask=torch.ones_like(ids) if mask else None)
    return count.seen


@pytest.mark.parametrize("mask", [False, True])
def test_a_layer_of_a_step_runs_no_more_operators_than_the_stock_model(tiny, ids, launched, mask):
    """Each takes the host 5 µs on a GPU. Where the stock model calls SDPA, ours allocates the output, and no more.

    From transformers 5.23 on, the stock model runs one more: it views the queries of a head of keys as rows.
    """
    counts = {}
    for layers in (2, 5):
        model = tiny(num_hidden_layers=layers)
        stock = operators(model, ids, mask)
        ours = operators(rpe3d.extend(model, context=256, **BOUNDED), ids, mask)
        assert ours["empty_like"] - stock["empty_like"] == layers + 1  # one more where the step is prepared
        counts[layers] = ours.total() - stock.total()
    assert len(launched) == 2 + 5
    assert counts[5] <= counts[2]
    assert counts[5] <= 8


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_layers_that_share_their_room_compute_as_each_alone(tiny, ids, monkeypatch, as_on_a_gpu, family):
    """The same logits as with plain PyTorch, step by step; gpt-oss has sinks, each layer its own."""
    from rpe3d.attention.decode import kernel, launch

    monkeypatch.setattr(launch, "split", lambda *_: 3)
    model = rpe3d.extend(tiny(family), context=256, **BOUNDED)
    found, rooms = [], []
    share = kernel.Step.output
    monkeypatch.setattr(kernel.Step, "output", lambda step, *given: rooms.append(step) or share(step, *given))
    for refused in (False, True):
        if refused:
            monkeypatch.setattr(decode, "machine_refusal", lambda device: "asked not to")
        with torch.no_grad():
            past = model(ids[:, :-3], use_cache=True).past_key_values
            found.append(torch.cat([model(token, past_key_values=past).logits for token in ids[:, -3:].split(1, 1)]))
    assert rooms
    torch.testing.assert_close(*found, rtol=0, atol=2e-4)
