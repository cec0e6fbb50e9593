"""The benchmark of layers over pages: its three ways compute the same, with FlashAttention played by plain PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from flash import flash

from rpe3d import make_law

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import pages

LAWS = {"3d-rpe": {"chunk": 32, "window": 64, "reach": 128}, "dca": {"chunk": 64, "window": 96}, "rope": {}}


@pytest.mark.parametrize("name", LAWS)
def test_calls_and_gathered_keys_give_the_same_prompt(name):
    """Under RoPE both are the plain calls that they are timed against: pieces, pages and scale are the same in all."""
    law = make_law(name, pretrained=128, context=1024, head_dim=32, **LAWS[name])
    torch.manual_seed(0)
    given = pages.random_layer(
        500, 96, heads=4, groups=2, dim=32, page=16, dtype=torch.float32, device="cpu"
    )  # fmt: skip
    true = pages.gathered(given, law)()
    made = pages.by_flash(given, law, flash, 4)() if name != "rope" else pages.plain(given, flash)()
    assert made.shape == (500, 4, 32)
    torch.testing.assert_close(made, true, atol=2e-5, rtol=0)
    others = pages.plain(given, flash)()
    assert name == "rope" or (made - others).abs().max() > 1e-2


def test_a_step_over_pages_is_held_to_the_specification():
    """Its longest sequence is judged, and one that has lost its law or reads other pages is far off."""
    from rpe3d.attention.decode import paged

    law = make_law("3d-rpe", pretrained=128, context=1024, head_dim=32, **LAWS["3d-rpe"])
    torch.manual_seed(0)
    given = pages.random_batch(
        [40, 700, 3], heads=4, groups=2, dim=32, page=16, longest=1024, dtype=torch.float32, device="cpu"
    )
    where = {"pages": given.pages, "lengths": given.lengths, "scale": pages.SCALE}
    vectors = (given.query, given.keys, given.values)
    assert pages.step_error(given, law, paged.attend(*vectors, law, **where)[0]) < 1e-5
    lost = make_law("rope", pretrained=128, context=1024, head_dim=32)
    assert pages.step_error(given, law, paged.attend(*vectors, lost, **where)[0]) > 1e-2
    other = where | {"pages": given.pages.flip(1)}
    assert pages.step_error(given, law, paged.attend(*vectors, law, **other)[0]) > 1e-2
