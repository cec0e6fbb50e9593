"""The survey of families: its three kinds of answer, on a family of each, and the page it writes."""

from __future__ import annotations

import pytest
import torch
import transformers

import survey as families
from survey import Row, page, survey

NEW = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 22), reason="its frequencies are others before 5.22"
)
BLOOM = "BloomConfig describes no rotary position encoding (rope_parameters)"


def test_a_llama_is_supported_a_hybrid_partly_and_a_model_without_rotation_refused(capsys):
    """gemma3 has one layer of full attention in six (its config's default); bloom has ALiBi."""
    rows = survey(["llama", "gemma3_text", "bloom"])
    assert rows == [
        Row(family="llama", verdict="supported", reason="4 of 4 layers"),
        Row(family="gemma3_text", verdict="partly", reason="1 of 6 layers, the others keep their sliding window"),
        Row(
            family="bloom",
            verdict="refused",
            reason="BloomConfig describes no rotary position encoding (rope_parameters)",
        ),
    ]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 3


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("ministral3", "4 of 4 layers"),  # no position ids reach its attention
        ("deepseek_v2", "4 of 4 layers"),  # the last dimensions turn, in neighbours
        ("gemma4_text", "1 of 6 layers, the others keep their sliding window"),  # a proportional base
        ("granite_swa", "1 of 4 layers, the others keep their sliding window"),  # copies of the config
        pytest.param("zaya", "4 of 4 layers", marks=NEW),  # layers by another name than full_attention
        ("mistral", "4 of 4 layers; as Mistral from v0.2 on has them"),
        ("qwen3_vl", "4 of 4 layers"),  # three rows of positions
    ],
)
def test_families_that_differ_from_llama_pass_the_same_checks(family, reason):
    """Each stands for a group: see docs/families.md for the others."""
    (row,) = survey([family])
    assert row.reason == reason


def test_a_head_taken_for_llamas_is_found_out(monkeypatch):
    """The pairs that a law turns must be those that the family turns: short inputs and decoding stay right."""
    from rpe3d.models.carried import Carried

    monkeypatch.setattr(Carried, "arranged", lambda self, x: x)
    (row,) = survey(["deepseek_v3"])
    assert (row.verdict, row.reason) == ("WRONG", "a layer's scores are not the law's")


def test_a_family_that_does_not_exist_is_not_tried():
    (row,) = survey(["no-such-family"])
    assert row.verdict == "not tried"
    assert "no-such-family" in row.reason


def test_a_law_that_turns_nothing_is_found_out(monkeypatch):
    """The survey must fail a model that `extend` accepts and leaves as it was."""
    monkeypatch.setattr(families, "extend", lambda model, *_, **__: model)
    (row,) = survey(["llama"])
    assert (row.verdict, row.reason) == ("WRONG", "an input of 100 tokens is not changed")


def test_a_law_that_turns_the_wrong_way_is_found_out(monkeypatch):
    """Short inputs, decoding and restoring all stay right then: only the stock layer at the law's distances tells."""
    from rpe3d.attention import Shared

    right = Shared.output

    def mirrored(self, query, key, value, law, **given):
        return right(self, query.flip(-1), key.flip(-1), value, law, **given)

    monkeypatch.setattr(Shared, "output", mirrored)
    (row,) = survey(["llama"])
    assert (row.verdict, row.reason) == ("WRONG", "a layer's scores are not the law's")


def test_a_family_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(families, "SECONDS", 1)
    monkeypatch.setattr(families, "build", lambda *_: [None for _ in iter(int, 1)])
    (row,) = survey(["llama"])
    assert (row.verdict, row.reason) == ("not tried", "took longer than 1 s")


def test_a_survey_leaves_gradients_and_the_log_level_as_they_were():
    from transformers.utils import logging

    before = logging.get_verbosity()
    survey(["bloom"])
    assert logging.get_verbosity() == before
    assert torch.is_grad_enabled()


def test_the_page_counts_and_sorts_by_verdict_then_name():
    rows = [
        Row(family="b", verdict="supported"),
        Row(family="c", verdict="WRONG", reason="x | y"),
        Row(family="a", verdict="supported"),
    ]
    text = page(rows)
    assert "1 WRONG, 2 supported." in text
    assert text.index("| c | WRONG | x \\| y |") < text.index("| a |") < text.index("| b |")


def test_the_page_counts_the_families_that_rotate_and_keeps_pictures_apart():
    """A family without rotation is none that a law could extend."""
    rows = [
        Row(family="llama", verdict="supported"),
        Row(family="falcon", verdict="refused", reason="its attention"),
        Row(family="bloom", verdict="refused", reason=BLOOM),
        Row(family="qwen3_vl", verdict="supported"),
    ]
    text = page(rows)
    assert "Of the 2 that rotate, 1 can be extended" in text
    assert text.index("| bloom |") < text.index("## Pictures and text") < text.index("| qwen3_vl |")


def test_the_command_writes_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["families", "bloom", "--out", str(tmp_path / "page.md")])
    families.main()
    assert "| bloom | refused |" in (tmp_path / "page.md").read_text()
