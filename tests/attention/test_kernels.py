"""Small kernels of attention against their plain forms, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from rpe3d import laws, make_law
from rpe3d.attention import merge
from rpe3d.attention.merge import Part, add_up
from rpe3d.attention.merge import kernel as merge_kernel
from rpe3d.rotation import cos_sin, rotate, table_kernel
from rpe3d.rotation.table import plain, table

FLOAT = torch.float32


@pytest.mark.parametrize("first", [0, 13, 999_983])
@pytest.mark.parametrize("name", laws())
def test_the_table_kernel_is_as_exact_as_float32_can_be(name, first, device):
    """Angles in float64 up to position 1,000,000; what is left is the rounding of cos and sin."""
    law = make_law(name, pretrained=600_000 if name == "string" else 64, context=1_100_000, head_dim=24)
    theta = law.frequencies().to(device)
    positions = range(first, first + 37)
    for turn in {region.query for region in law.regions} | {region.key for region in law.regions}:
        exact = plain(turn, positions, theta, torch.float64)
        made = table_kernel.table(turn, positions, theta) if turn.in_numbers else table(turn, positions, theta, FLOAT)
        for got, truth in zip(made, exact, strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), truth, rtol=0, atol=4e-7)


@pytest.mark.parametrize("first", [0, 999_983])
def test_planes_that_turn_differently_have_the_tables_of_their_turns(first, device):
    """The kernel knows one turn for all planes; `table` takes the plain way for others, on every device."""
    law = make_law("dpe", pretrained=64, context=1_100_000, head_dim=24, scales=(3, 1000, 1))
    theta, positions = law.frequencies().to(device), range(first, first + 37)
    turn = law.regions[1].query
    exact = plain(turn, positions, theta, torch.float64)
    for n, got in enumerate(table(turn, positions, theta, torch.float32)):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact[n], rtol=0, atol=4e-7)
        for part, (_, alone), own in zip(got.split(4, dim=1), turn.groups, theta.split(4), strict=True):
            torch.testing.assert_close(part, table_kernel.table(alone, positions, own)[n], rtol=0, atol=4e-7)


def test_parts_add_up_where_they_lie(device):
    """A whole part, a part of the rows, and repetitions with gaps; rows of none are zeros."""
    whole = torch.randn(1, 3, 20, 24, device=device)
    some = torch.randn(1, 3, 5, 24, device=device)
    repeated = torch.randn(2, 3, 3, 24, device=device)
    expected = torch.zeros(1, 3, 25, 24, device=device)
    expected[:, :, :20] += whole
    expected[:, :, 4:9] += some
    expected[:, :, 2:5] += repeated[:1]
    expected[:, :, 10:13] += repeated[1:]
    parts = [Part(whole, whole), Part(some, some, 4), Part(repeated, repeated, 2, 8)]
    plainly, by_kernel = (torch.full_like(expected, torch.nan) for _ in range(2))
    add_up(parts, plainly)
    merge_kernel.add_up(parts, by_kernel)
    torch.testing.assert_close(plainly, expected)
    torch.testing.assert_close(by_kernel, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_turned_parts_are_turned_back_as_they_add_up(count, interleaved, dtype, device, monkeypatch):
    """The transpose of a rotation, by autograd in float64; more parts than a kernel takes are summed in float32."""
    monkeypatch.setattr(merge, "fuses", lambda out: True)

    def parts(n):
        made = []
        for i in range(n):
            times, rows, start, step = ((1, 21, 0, 0), (1, 5, 4, 0), (2, 3, 2, 8))[i % 3]
            x = torch.randn(times, rows, 3, 24).transpose(1, 2).to(device, dtype)
            made.append(Part(x, x, start, step, flipped=i % 2 == 1))
        return made

    def total(some):
        result = torch.zeros(1, 3, 21, 24, dtype=torch.float64, device=device)
        for part in some:
            x = part.out.flip(2) if part.flipped else part.out
            for n in range(x.shape[0]):
                first = part.start + n * part.step
                result[0, :, first : first + x.shape[2]] += x[n]
        return result

    plain, turned = parts(count), parts(count)
    table = cos_sin(torch.randn(21, 12, dtype=torch.float64, device=device), dtype=torch.float64)
    x = torch.zeros(1, 3, 21, 24, dtype=torch.float64, device=device, requires_grad=True)
    (back,) = torch.autograd.grad(rotate(x, None, *table, interleaved=interleaved)[0], x, total(turned))
    out = torch.full((1, 21, 3, 24), torch.nan, dtype=dtype, device=device).transpose(1, 2)
    merge.add_up(plain, out, turned, tuple(y.float() for y in table), interleaved=interleaved)
    torch.testing.assert_close(out.double(), total(plain) + back, rtol=torch.finfo(dtype).eps, atol=1e-5)
