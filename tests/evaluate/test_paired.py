"""Differences between laws on the same windows, and their intervals."""

from __future__ import annotations

import math

import numpy
import pytest

from rpe3d.config import ConfigError
from rpe3d.evaluate.paired import bootstrap, paired


def row(law, losses, *, length=64, passed=(True, False), status="ok"):
    windows = [{"nll": loss, "tail_nll": 2 * loss} for loss in losses]
    passkeys = [{"correct": one} for one in passed]
    return {
        "law": law,
        "length": length,
        "status": status,
        "windows": windows,
        "copies": [{"nll": losses[0]}],
        "passkeys": passkeys,
    }


def test_the_interval_is_that_of_the_normal_mean_where_there_are_many():
    """The central limit theorem: 1.96 standard errors on either side of the mean."""
    values = numpy.random.default_rng(1).normal(0.3, 2.0, 400)
    found = bootstrap(values.tolist())
    error = 1.96 * values.std() / math.sqrt(400)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - error, abs=0.02)
    assert found.high == pytest.approx(values.mean() + error, abs=0.02)
    assert found == bootstrap(values.tolist())


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
