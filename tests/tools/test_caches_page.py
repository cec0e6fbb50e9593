"""The page about caches: its verdicts come from running, and its template leaves nothing open."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, cache_utils

import caches as tool
from tiny import LONG, build


def ids():
    return torch.randint(3, 97, (1, LONG), generator=torch.Generator().manual_seed(1))


def test_a_cache_that_loses_keys_is_found_out():
    """One that forgets its second key: the page must not say exact."""

    class Forgetful(DynamicCache):
        def update(self, key, value, *args, **kwargs):
            key, value = super().update(key, value, *args, **kwargs)
            key = key.clone()
            key[:, :, 1] = 0
            return key, value

    with torch.no_grad():
        found = tool.verdict("dynamic", build("llama", ids()), lambda config: Forgetful(config=config), ids())
        assert found == "WRONG"
        assert tool.verdict("dynamic", build("llama", ids()), tool._caches()["dynamic"], ids()) == "exact"


@pytest.mark.skipif(
    not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no 8-bit floating point cache"
)
def test_a_law_that_is_not_the_specifications_is_found_out_in_a_rounded_cache(monkeypatch):
    """Rounding must hide nothing: attention that is a hundredth off is WRONG."""
    right = tool.attend

    def off(*args, **given):
        out, weights = right(*args, **given)
        return out * 1.01, weights

    with torch.no_grad():
        assert tool.verdict("fp8", build("llama", ids()), tool._caches()["fp8"], ids()) == "rounded"
        monkeypatch.setattr(tool, "attend", off)
        assert tool.verdict("fp8", build("llama", ids()), tool._caches()["fp8"], ids()) == "WRONG"


def test_the_page_is_written(tmp_path, monkeypatch):
    """One family and two caches, to be quick."""
    known = tool._caches()
    monkeypatch.setattr(tool, "FAMILIES", ("llama",))
    monkeypatch.setattr(tool, "_caches", lambda: {"dynamic": known["dynamic"]})
    survey = tmp_path / "families.md"
    survey.write_text("Of the 7 that rotate, 5 can be extended")
    monkeypatch.setattr("sys.argv", ["caches", "--families", str(survey), "--out", str(tmp_path / "page.md")])
    tool.main()
    text = (tmp_path / "page.md").read_text()
    assert "| dynamic | exact |" in text
    assert "5 of 7 that rotate" in text
    assert "{" not in text
