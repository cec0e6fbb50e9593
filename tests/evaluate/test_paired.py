"""Differences between laws on the same windows, and their intervals."""

from __future__ import annotations

import math
from itertools import product

import numpy
import pytest

from rpe3d.config import ConfigError
from rpe3d.evaluate.paired import mean_difference, paired, paired_shares, student


def row(law, losses, *, length=64, passed=(True, False), status="ok", apart=64):
    windows = [{"text": "a", "start": i * apart, "nll": loss, "tail_nll": 2 * loss} for i, loss in enumerate(losses)]
    passkeys = [{"correct": one} for one in passed]
    return {
        "law": law,
        "length": length,
        "status": status,
        "windows": windows,
        "copies": [{"nll": losses[0]}],
        "passkeys": passkeys,
    }


def test_t_is_that_of_the_printed_tables():
    """Two-sided 5 % points, as any table of Student's distribution has them."""
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 11: 2.201, 15: 2.131, 39: 2.023, 120: 1.980, 5000: 1.960}
    assert {n: round(student(n), 3) for n in table} == table


@pytest.mark.parametrize("n", [3, 4, 12])
def test_the_interval_of_a_mean_covers_it_95_times_of_100(n):
    """Issue 20, point 13: the percentile bootstrap covers 76, 79 and 91 of 100 here."""
    draws = numpy.random.default_rng(n).normal(0.3, 2.0, (4000, n)).tolist()
    found = [mean_difference(values) for values in draws]
    assert numpy.mean([one.low <= 0.3 <= one.high for one in found]) == pytest.approx(0.95, abs=0.012)


@pytest.mark.parametrize(("n", "least"), [(10, 0.93), (40, 0.935)])
def test_the_interval_of_passkeys_covers_their_difference(n, least):
    """Exact, over all outcomes: each of `n` trials is better, worse or the same, with the chances of a grid."""
    counts = [(up, down) for up in range(n + 1) for down in range(n + 1 - up)]
    bounds = [paired_shares([1.0] * up + [-1.0] * down + [0.0] * (n - up - down)) for up, down in counts]
    for better, worse in product((0.01, 0.05, 0.1, 0.2, 0.4), repeat=2):
        covered = 0.0
        for (up, down), one in zip(counts, bounds, strict=True):
            if one.low <= better - worse <= one.high:
                ways = math.comb(n, up) * math.comb(n - up, down)
                covered += ways * better**up * worse**down * (1 - better - worse) ** (n - up - down)
        assert covered > least, (better, worse)


def test_the_interval_of_passkeys_is_that_of_statpsych():
    """R's statpsych documents `ci.prop.ps(.05, 12, 4, 26, 6)`: 0.2548067 to 0.6251933."""
    found = paired_shares([1.0] * 26 + [-1.0] * 4 + [0.0] * 18)
    assert (found.low, found.high) == pytest.approx((0.2548067, 0.6251933), abs=1e-6)


def test_passkeys_that_all_agree_do_not_make_an_interval_of_no_width():
    found = paired_shares([0.0] * 40)
    assert (found.mean, round(found.low, 3), round(found.high, 3)) == (0.0, -0.066, 0.066)
    assert paired_shares([-1.0] * 40).low == -1.0


def test_windows_are_compared_one_by_one():
    """Windows far apart, laws a constant apart: the pairing leaves no spread at all."""
    results = {"rows": [row("a", [1.0, 5.0, 9.0]), row("b", [1.5, 5.5, 9.5], passed=(True, True))]}
    (found,) = paired(results, "a")
    assert (found["law"], found["length"]) == ("b", 64)
    assert (found["nll"].mean, found["nll"].low, found["nll"].high, found["nll"].n) == (0.5, 0.5, 0.5, 3)
    assert found["nll"].clear
    assert found["tail_nll"].mean == 1.0
    assert found["passkey"].mean == 0.5
    assert not found["passkey"].clear


@pytest.mark.parametrize(("losses", "apart"), [([2.0], 64), ([2.0, 3.0], 64), ([2.0, 3.0, 2.5, 2.6], 32)])
def test_fewer_than_three_windows_and_windows_that_overlap_have_no_interval(losses, apart):
    results = {"rows": [row("a", [1.0] * len(losses), apart=apart), row("b", losses, apart=apart)]}
    (found,) = paired(results, "a")
    for measure in ("nll", "tail_nll"):
        assert found[measure].mean > 0
        assert (found[measure].low, found[measure].high, found[measure].clear) == (None, None, False)


def test_rows_that_were_not_measured_are_left_out():
    results = {"rows": [row("a", [1.0]), row("b", [2.0], status="out of memory"), row("c", [2.0], length=128)]}
    assert paired(results, "a") == []
    results["rows"].append(row("d", [3.0], passed=()))
    (found,) = paired(results, "a")
    assert "passkey" not in found
    assert found["copy_nll"].mean == 2.0


def test_an_unknown_law_is_refused():
    with pytest.raises(ConfigError, match="law"):
        paired({"rows": [row("a", [1.0])]}, "z")
