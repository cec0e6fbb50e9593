"""The cost of a law: what the schedule executes."""

from __future__ import annotations

import pytest

from rpe3d import laws, make_law
from rpe3d.analysis.cost import cost
from rpe3d.attention.blocked.schedule import schedule


def example(name, **given):
    return make_law(name, **({"pretrained": 512, "context": 10_000, "head_dim": 32} | given))


def visible(law):
    """Pairs of the causal triangle that lie in a region, one by one."""
    import torch

    p = torch.arange(law.context)
    inside = torch.zeros(law.context, law.context, dtype=torch.bool)
    for region in law.regions:
        inside |= region.contains(p[:, None].expand(-1, law.context), p[None, :].expand(law.context, -1))
    return int((inside & (p[None, :] <= p[:, None])).sum())


@pytest.mark.parametrize("name", laws())
def test_pairs_are_those_that_the_law_attends_to(name):
    law = example(name, context=1000)
    assert cost(law).pairs == pytest.approx(visible(law) / (1000 * 1001 / 2), rel=1e-12)


def test_calls_are_those_of_the_schedule():
    law = example("3d-rpe")
    everything = range(law.context)
    blocks = schedule(law.regions, everything, everything, 4096)
    assert cost(law).calls == sum(len(block.calls) for block in blocks) > 3
    assert cost(example("rope")).calls == 1


def test_copies_are_counted_where_vectors_are_turned():
    """2 bytes x head_dim for each of 4096 queries in a block, and for each far key."""
    law = example("3d-rpe")
    assert (cost(law).query_bytes, cost(law).key_bytes) == (64 * 4096, 64 * 10_000)
    assert (cost(example("rope")).query_bytes, cost(example("rope")).key_bytes) == (0, 0)
    assert cost(example("string")).key_bytes == 0


def test_a_window_of_a_token_in_a_million_is_not_counted():
    assert cost(example("rerope", context=10**6, window=1)).calls is None
