"""The report says what the results say, in a page that needs nothing else, and is whole or absent."""

from __future__ import annotations

import csv
import errno
import math
import os
import re
import struct
from html.parser import HTMLParser
from itertools import combinations, pairwise

import numpy as np
import pytest

import rpe3d
from rpe3d.config import ConfigError
from rpe3d.drawing.axes import spread
from rpe3d.evaluate.findings import findings
from rpe3d.evaluate.names import short_names
from rpe3d.evaluate.plots import plots, smoothed
from rpe3d.evaluate.report import write_report
from rpe3d.geometry import LAWS, styles

PRETRAINED = 1024
VOID = {"meta", "path", "rect", "use", "br", "link"}


def windows(ppl, noise=(0.0,) * 4):
    """Four windows, the later the harder, on which a law with this perplexity is that much off."""
    losses = [math.log(ppl) + 0.2 * i + off for i, off in enumerate(noise)]
    return [{"text": "a.txt", "start": 10_000 * i, "nll": nll, "tail_nll": nll} for i, nll in enumerate(losses)]


def reading(found, ppl, **noise):
    """The same row with another perplexity."""
    return found | {"ppl": ppl, "windows": windows(ppl, **noise)}


def row(law, length, ppl=20.0, broken_from=None, **given):
    """A finished row whose text is equally hard everywhere, but 20 times as hard from `broken_from` on."""
    buckets = [
        {"from": at, "to": at + 128, "n": 128, "nll": 3.0 + 3.0 * (broken_from is not None and at >= broken_from)}
        for at in range(0, length, 128)
    ]
    made = rpe3d.make_law(law, pretrained=PRETRAINED, context=max(length, PRETRAINED), head_dim=64)
    return {
        "law": law, "length": length, "status": "ok", "ppl": ppl, "tail_ppl": ppl + 1, "copy_nll": 0.5,
        "passkey": 1, "passkey_n": 2, "tokens": 4 * length, "seconds": 2.5, "tokens_per_second": 1234.5,
        "parameters": {name: getattr(made, name) for name in made.parameters()},
        "windows": windows(ppl), "positions": buckets,
        "copies": [{"nll": given.get("copy_nll", 0.5) + 0.1 * seed, "seed": seed} for seed in range(4)],
        "passkeys": [
            {"depth": 0.25, "key": 12345, "answer": "54321", "correct": False},
            {"depth": 0.75, "key": 12345, "answer": "12345", "correct": True},
        ],
    } | given  # fmt: skip


MISSING = dict.fromkeys(("ppl", "tail_ppl", "copy_nll", "passkey", "passkey_n", "tokens_per_second")) | {
    name: [] for name in ("windows", "positions", "copies", "passkeys")
}


def lost(law, length, status="out of memory"):
    return row(law, length) | MISSING | {"status": status}


def results(*rows, **given):
    return {
        "schema": 1,
        "kind": "compare",
        "command": "rpe3d compare default",
        "model": {"name": "default", "architecture": "LlamaForCausalLM", "parameters": 134_515_008, "head_dim": 64}
        | {"pretrained": PRETRAINED, "rope_theta": 10000.0, "dtype": "float32", "device": "cpu"},
        "versions": {"rpe3d": "0.1.0", "torch": "2.13.0", "transformers": "5.22.2", "python": "3.11.2"},
        "settings": {"laws": list(dict.fromkeys(r["law"] for r in rows)), "windows": 4, "seed": 0}
        | {"lengths": sorted({r["length"] for r in rows}), "measures": ["ppl", "copy", "passkey"]},
        "texts": [{"name": "a.txt", "sha256": "ab" * 32, "tokens": 5000}],
        "rows": list(rows),
    } | given


FOUR = [
    row("rope", 4096, 90.0, broken_from=1280, copy_nll=6.0, passkey=0),
    row("yarn", 4096, 35.5),
    row("dca", 4096, 34.5),
    row("3d-rpe", 4096, 34.0, copy_nll=0.25, passkey=2),
]


class Page(HTMLParser):
    """What a reader sees, and whether every tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.cells, self.addresses = [], [], "", [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_data(self, text):
        if "style" not in self.open:
            self.text += text
        if {"td", "th"} & set(self.open):
            self.cells[-1] += text


def page_of(found, folder):
    write_report(found, folder)
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_a_report_is_a_page_with_its_plots_and_table_beside_it(tmp_path):
    written = write_report(results(*FOUR), tmp_path / "new" / "report")
    assert sorted(path.name for path in written) == [
        "passkey.png", "positions.png", "profile.png", "report.html", "table.csv"
    ]  # fmt: skip
    assert sorted((tmp_path / "new" / "report").iterdir()) == sorted(written)
    for path in written:
        if path.suffix == ".png":
            png = path.read_bytes()
            assert png.startswith(b"\x89PNG")
            assert min(struct.unpack(">II", png[16:24])) > 150


def test_the_page_needs_nothing_from_outside(tmp_path):
    page = page_of(results(*FOUR), tmp_path)
    beside = {path.name for path in tmp_path.iterdir()}
    assert all(address.startswith("#") or address in beside for address in page.addresses)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in page.tags}


def test_ids_are_unique_and_every_use_has_its_target(tmp_path):
    """Several SVGs of matplotlib share a page: their clip paths and ticks must not be mixed up."""
    page = page_of(results(*FOUR, *(row(r["law"], 2048) for r in FOUR)), tmp_path)
    names = [attributes["id"] for _, attributes in page.tags if attributes.get("id", "").startswith(("p", "m"))]
    drawn = [name for name in names if re.fullmatch(r"[pm][0-9a-f]{10}", name)]
    assert drawn
    assert len(drawn) == len(set(drawn))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert set(re.findall(r"url\(#(\w+)\)", text)) | {a[1:] for a in page.addresses if a.startswith("#")} <= set(names)


def test_the_page_holds_every_number_of_the_table_and_marks_the_best(tmp_path):
    page = page_of(results(*FOUR), tmp_path)
    for expected in ("90.00", "35.50", "34.50", "34.00", "91.00", "6.00", "0.25", "0/2", "2/2", "1,234"):
        assert expected in page.cells
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall(r'<td class="best">(.*?)</td>', text) == ["34.00", "35.00", "0.25"]


def test_within_the_noise_nobody_is_marked_nor_crowned(tmp_path):
    """dca is 1 % better on the mean, and worse on half of the windows."""
    noisy = [reading(r, 33.7, noise=(-0.02, 0.02, -0.015, 0.02)) if r["law"] == "dca" else r for r in FOUR]
    write_report(results(*noisy), tmp_path)
    best = re.findall(r'<td class="best">(.*?)</td>', (tmp_path / "report.html").read_text(encoding="utf-8"))
    assert set(best) >= {"33.70", "34.00"}
    assert "36.50" not in best  # yarn
    assert "4 laws are within the noise of each other: dca 33.70 and 3d-rpe 34.00; then" in findings(results(*noisy))[0]
    two = [
        reading(row(law, 4096), ppl, noise=noise)
        for law, ppl, noise in (("rope", 20.0, (0.0,) * 4), ("yarn", 20.1, (0.1, -0.1, 0.1, -0.1)))
    ]
    assert findings(results(*two))[0].endswith(
        "no law reads better than another, within the noise: rope 20.00, yarn 20.10."
    )


def test_a_single_window_tells_no_law_from_another(tmp_path):
    """As in the demo: 10.03 and 10.04 on one window are not a result."""
    once = [r | {"windows": r["windows"][:1], "copies": r["copies"][:1]} for r in FOUR]
    assert findings(results(*once))[0].endswith(
        "the perplexities are: 3d-rpe 34.00, dca 34.50, yarn 35.50, rope 90.00 (one window: small differences may be "
        "noise)."
    )
    page_of(results(*once), tmp_path)
    assert 'class="best">' not in re.sub(r"<b .*?</b>", "", (tmp_path / "report.html").read_text())


def test_differences_are_on_the_page_with_their_intervals(tmp_path):
    write_report(results(*FOUR), tmp_path, "3d-rpe")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "Differences from 3d-rpe" in page.text
    percent = f"{100 * math.log(34.5 / 34.0):+.2f}"
    assert f"{percent} ✗({percent} .. {percent})" in page.cells
    assert "Differences from rope" in page_of(results(*FOUR), tmp_path / "stock").text
    assert "Differences" not in page_of(results(FOUR[0]), tmp_path / "alone").text


def test_long_labels_get_short_names_that_the_page_explains(tmp_path):
    """A law with five parameters took two thirds of a plot."""
    long = "3d-rpe:chunk=512,window=1536,reach=3072,focus=2,fade=.125"
    rows = [FOUR[0], FOUR[3], row("3d-rpe", 4096) | {"law": long, "name": "3d-rpe"}]
    page = page_of(results(*rows), tmp_path)
    assert f"3d-rpe 1 is {long}." in page.text
    assert not any(long in cell for cell in page.cells if "rpe3d" not in cell)
    with (tmp_path / "table.csv").open(encoding="utf-8", newline="") as file:
        assert [r["law"] for r in csv.DictReader(file)] == ["rope", "3d-rpe", long]
    taken = short_names(["a" * 30, "b" * 30, "a" * 15 + " 1", "x"])
    assert list(taken.values()) == ["a" * 15 + " 2", "b" * 15 + " 1", "a" * 15 + " 1", "x"]


def test_the_csv_holds_every_row_unrounded(tmp_path):
    found = results(row("rope", 2048, 1 / 3) | {"commit": "0123abc+"}, lost("rope", 4096))
    write_report(found, tmp_path)
    with (tmp_path / "table.csv").open(encoding="utf-8", newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["law"], first["length"], float(first["ppl"]), first["passkey_n"]) == ("rope", "2048", 1 / 3, "2")
    assert (second["status"], second["ppl"]) == ("out of memory", "")
    assert (first["commit"], second["commit"]) == ("0123abc+", "")


def test_the_page_says_how_it_was_made(tmp_path):
    page = page_of(results(*FOUR), tmp_path)
    for expected in ("rpe3d compare default", "2.13.0", "ab" * 32, "5,000 tokens", "a.txt", "LlamaForCausalLM", "1024"):
        assert expected in page.text
    reach = FOUR[3]["parameters"]["reach"]
    assert any(f"reach {reach}" in cell for cell in page.cells)


def test_the_headline_names_the_best_law_at_the_longest_length_and_where_stock_breaks():
    headline, breaks, *others = findings(results(row("rope", 2048, 1.0), *FOUR))
    assert headline == (
        "At 4k tokens, 4 times its pretrained 1k, 3d-rpe has the lowest perplexity of 4 laws, 34.00; "
        "then dca 34.50 and stock RoPE 90.00."
    )
    at = int(re.search(r"about token ([\d,]+)", breaks)[1].replace(",", ""))
    assert abs(at - 1280) <= 256
    assert "more than twice that of 3d-rpe" in breaks
    assert others == [
        "Passkeys found at 4k: 3d-rpe 2 of 2, yarn and dca 1 of 2, rope 0 of 2.",
        "Copying from the beginning to the end of 4k, NLL per token: 3d-rpe 0.25, yarn and dca 0.50, rope 6.00.",
    ]


def test_of_a_single_passkey_both_answers_are_said():
    def asked(law, answer):
        trial = {"depth": 0.1, "key": 25248, "answer": answer, "correct": answer.strip() == "25248"}
        return row(law, 4096) | {"passkey": int(trial["correct"]), "passkey_n": 1, "passkeys": [trial]}

    said = findings(results(asked("rope", " a key"), row("yarn", 4096) | MISSING, asked("3d-rpe", " 25248")))
    assert "Asked for the passkey 25248, about 3,686 tokens back: 3d-rpe answers '25248', rope answers 'a key'." in said


def test_findings_follow_the_numbers_wherever_they_point():
    """No law is favoured: the same rows with the numbers of two laws exchanged give the other winner."""
    swapped = [reading(r, {"3d-rpe": 34.5, "dca": 34.0}.get(r["law"], r["ppl"])) for r in FOUR]
    assert "dca has the lowest perplexity" in findings(results(*swapped))[0]
    whole = [row("rope", 4096, 20.0), row("3d-rpe", 4096, 21.0)]
    headline, breaks = findings(results(*whole))[:2]
    assert "rope has the lowest perplexity of 2 laws" in headline
    assert breaks.startswith("Stock RoPE does not break")
    alone = findings(results(row("rope", 4096, 90.0, broken_from=2048)))
    assert alone[0] == "At 4k tokens, 4 times its pretrained 1k, rope has perplexity 90.00."
    assert "within the pretrained length" in alone[1]
    short = findings(results(row("rope", 512), row("yarn", 512)))
    assert not any("break" in sentence for sentence in short)


def test_a_model_of_fewer_positions_than_a_bucket_has_findings(tmp_path):
    """64 positions hold no bucket of 128: stock RoPE, where it reads best, has no beginning to break from."""
    found = results(row("rope", 256, 20.0), row("3d-rpe", 256, 21.0))
    found["model"]["pretrained"] = 64
    said = findings(found)
    assert "rope has the lowest perplexity of 2 laws" in said[0]
    assert not any("break" in sentence for sentence in said)
    assert any(path.name == "report.html" for path in write_report(found, tmp_path / "out"))


def test_what_was_not_measured_is_said(tmp_path):
    found = results(*FOUR[:3], lost("3d-rpe", 4096), lost("rope", 8192))
    assert findings(found)[-1] == "Out of memory: 3d-rpe at 4k and rope at 8k."
    page = page_of(found, tmp_path)
    assert "out of memory" in page.cells
    assert "Unfinished: 5 of 8 rows" in page.text
    nothing = results(lost("rope", 4096))
    assert findings(nothing) == ["Nothing could be measured.", "Out of memory: rope at 4k."]
    assert "Nothing could be measured." in page_of(nothing, tmp_path / "nothing").text


@pytest.mark.parametrize("asked", [("ppl",), ("copy",), ("passkey",)])
def test_measures_that_were_not_asked_for_leave_no_empty_column_or_plot(tmp_path, asked):
    fields = {
        "ppl": ("ppl", "tail_ppl", "tokens_per_second", "windows", "positions"),
        "copy": ("copy_nll", "copies"),
        "passkey": ("passkey", "passkey_n", "passkeys"),
    }
    kept = {name for measure in asked for name in fields[measure]}
    found = results(*(r | {name: gone for name, gone in MISSING.items() if name not in kept} for r in FOUR))
    page = page_of(found, tmp_path)
    columns = {"ppl", "tail ppl", "copy", "passkey", "tokens/s"} & set(page.cells)
    assert columns == {"ppl": {"ppl", "tail ppl", "tokens/s"}, "copy": {"copy"}, "passkey": {"passkey"}}[asked[0]]
    assert (tmp_path / "positions.png").exists() == ("ppl" in asked)
    assert (tmp_path / "passkey.png").exists() == ("passkey" in asked)


def test_all_laws_at_four_lengths_and_one_law_at_one(tmp_path):
    laws, lengths = list(rpe3d.laws()), (1024, 2048, 4096, 8192)
    page = page_of(results(*(row(law, length) for law in laws for length in lengths)), tmp_path / "all")
    drawn = [attributes["aria-label"] for tag, attributes in page.tags if attributes.get("role") == "img"]
    assert len(drawn) == len(lengths) + 1 + len(laws)
    assert all(law in drawn[0] for law in laws)
    assert (tmp_path / "all" / "report.html").stat().st_size < 1_000_000
    assert "rope" in page_of(results(row("rope", 2048)), tmp_path / "one").cells


def test_names_from_the_results_are_text_never_markup(tmp_path):
    evil = '<script>alert("x")</script> & $x^2$'
    found = results(
        row("rope", 4096),
        row("3d-rpe", 4096) | {"law": evil, "name": "3d-rpe", "parameters": {"chunk": evil}},
        command=evil,
        texts=[{"name": evil, "sha256": evil, "tokens": 1}],
        versions={evil: evil},
    )
    found["model"] |= {"name": evil, "architecture": evil}
    found["rows"].append(lost("rope", 8192, f"skipped: {evil}"))
    found["settings"]["lengths"] = [4096, 8192]
    page = page_of(found, tmp_path)
    assert not any(tag == "script" for tag, _ in page.tags)
    assert page.cells.count(evil) >= 4
    assert evil in page.text


def test_a_law_has_the_same_colour_in_every_report_and_no_two_look_alike():
    assert styles(["3d-rpe", "rope"])["3d-rpe"] == styles(["rope", "dca", "3d-rpe"])["3d-rpe"] == LAWS["3d-rpe"].style
    looks = styles([*LAWS, "tuned", "other"])
    assert len({(style.colour, style.dash) for style in looks.values()}) == len(looks)


# Machado, Oliveira and Fernandes 2009, severity 1: what protanopes, deuteranopes and tritanopes see, in linear RGB.
SEEN_BY = {
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopes": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopes": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopes": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb.clip(0, 1)
    x, y, z = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colour_blind_readers_can_tell_whole_lines_apart(scheme):
    """Ten times the difference in CIELAB that a trained eye just sees; dashed lines differ by their dash as well."""
    whole = [linear(getattr(style.colour, scheme)) for style in styles(LAWS).values() if not style.dash]
    for matrix in map(np.array, SEEN_BY.values()):
        places = [lab(matrix @ rgb) for rgb in whole]
        assert min(np.linalg.norm(a - b) for a, b in combinations(places, 2)) >= 23


def test_lines_stand_out_from_the_page_in_light_and_dark():
    """WCAG 2.2, 1.4.11: 3 to 1 for graphics."""

    def luminance(colour):
        return float(linear(colour) @ [0.2126, 0.7152, 0.0722])

    for style in styles([*LAWS, "a", "b", "c", "d"]).values():
        assert 1.05 / (luminance(style.colour.light) + 0.05) >= 3
        assert (luminance(style.colour.dark) + 0.05) / (luminance("#141417") + 0.05) >= 3


def test_the_profile_is_made_of_the_parameters_in_the_results():
    """A law file's row is drawn by its law's name, and a law without one relative position is named as missing."""
    tuned = row("3d-rpe", 4096) | {"law": "tuned", "name": "3d-rpe"}
    profile = next(
        plot for plot in plots(results(row("rope", 4096), row("yarn", 4096), tuned)) if plot.name == "profile"
    )
    assert profile.panels[0].alt.endswith("for rope, tuned.")
    assert profile.caption.endswith("no single relative position: yarn.")


def test_smoothing_weighs_buckets_by_their_tokens():
    buckets = [{"nll": nll, "n": n} for nll, n in ((1.0, 1), (2.0, 1), (3.0, 2))]
    assert smoothed(buckets) == pytest.approx([2.25, 2.25, 2.25])
    assert smoothed([{"nll": float(i), "n": 1} for i in range(9)])[4] == 4.0


@pytest.mark.parametrize("wanted", [[0.5], [0.1, 0.9], [0.5] * 4, [0.0] * 5, [1.0] * 13, [0.0, 0.01, 0.98, 1.0]])
def test_labels_keep_their_order_and_their_distance(wanted):
    places = spread(wanted, gap=0.07)
    assert all(after - before >= 0.07 - 1e-9 for before, after in pairwise(places))
    assert min(places) >= -1e-9
    assert max(places) <= 1 + 1e-9
    if wanted == [0.1, 0.9]:
        assert places == pytest.approx(wanted)


def test_a_report_is_whole_or_absent(tmp_path, monkeypatch):
    (tmp_path / "report.html").write_text("old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(ConfigError, match=r"cannot write the report to .*No space left"):
            write_report(results(*FOUR), tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report.html", "old")]
    with pytest.raises(ConfigError, match="cannot write the report"):
        write_report(results(*FOUR), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == "old"


@pytest.mark.parametrize("given", [{"schema": 2}, {"kind": "tune"}])
def test_other_results_are_refused(tmp_path, given):
    with pytest.raises(ConfigError, match="not results of `rpe3d compare`"):
        write_report(results(*FOUR, **given), tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_the_same_results_give_the_same_page(tmp_path):
    for name in ("a", "b"):
        write_report(results(*FOUR), tmp_path / name)
    assert (tmp_path / "a" / "report.html").read_bytes() == (tmp_path / "b" / "report.html").read_bytes()
