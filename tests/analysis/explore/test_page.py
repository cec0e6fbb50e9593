"""The page as a file: whole, without addresses of others, and with the answers that the server would give."""

from __future__ import annotations

import base64
import gzip
import json
import re
import zlib

import pytest
import torch

from rpe3d import laws
from rpe3d.analysis.explore.answer import answer
from rpe3d.analysis.explore.page import FILE, LIVE, START, file_page, grid, key, live_page

SMALL = {name: stops[:1] for name, stops in FILE.items()} | {"chunk": [256, 700], "head_dim": [64, 128]}


def setup_of(page):
    return json.loads(re.search(r'<script type="application/json" id="setup">(.*?)</script>', page, re.DOTALL)[1])


@pytest.fixture(scope="module")
def small():
    """A few answers at a time gain nothing from a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield file_page(stops=SMALL)
    torch.set_num_threads(before)


def test_a_file_has_the_answer_to_every_question_that_its_sliders_ask(small):
    """Equal to the last digit: the file holds answers, and computes none."""
    packed = json.loads(gzip.decompress(base64.b64decode(setup_of(small)["answers"])))
    questions = list(grid(SMALL))
    assert len(packed["answers"]) == len(questions) > 80
    assert {question["law"] for question in questions} == set(laws())
    for question in questions[::7]:
        parts = packed["answers"][key(question)]
        found = {name: packed["parts"][place] for name, place in parts.items()}
        assert found == json.loads(json.dumps(answer(question)))


def test_an_invalid_setting_is_in_the_file_with_its_explanation(small):
    packed = json.loads(gzip.decompress(base64.b64decode(setup_of(small)["answers"])))
    asked = {"law": "3d-rpe", "pretrained": 4096, "context": 16384, "head_dim": 64, "rope_theta": 10000}
    parts = packed["answers"][key({**asked, "chunk": 700, "window": 1024})]
    assert "not a multiple of chunk 700" in packed["parts"][parts["error"]]["problem"]


def test_the_grid_of_a_file_asks_each_question_once_and_no_other_twice():
    keys = [key(question) for question in grid(FILE)]
    assert len(keys) == len(set(keys))
    assert len(keys) == 48 * (27 + 2 * 9 + 3 + 5 * 3 + 10)  # chunk, window, reach: three, two, one, or none of them


def test_the_same_file_is_written_every_time(small):
    assert zlib.crc32(file_page(stops=SMALL).encode()) == zlib.crc32(small.encode())


@pytest.mark.parametrize("which", ["live", "file"])
def test_a_page_needs_nothing_from_outside(which, small):
    page = live_page() if which == "live" else small
    assert "%%" not in re.sub(r"<script.*", "", page, flags=re.DOTALL)
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert not re.search(r"@import|url\((?!#)", page.split("<script")[0])
    assert "default-src 'none'" in page


def test_text_of_results_cannot_leave_its_place():
    """A law file may be called anything."""
    evil = "</script><script>alert(1)</script>"
    rows = [{"law": evil, "length": 4096, "ppl": 1.0, "position": [], "perplexity": []}]
    measured = {"model": {"name": evil, **START}, "laws": [evil], "lengths": [4096], "rows": rows}
    page = live_page(measured)
    assert "alert(1)</script>" not in page
    assert setup_of(page)["measured"]["model"]["name"] == evil


def test_a_page_with_results_opens_with_the_model_that_was_measured():
    model = {"name": "tiny", "pretrained": 2048, "head_dim": 128, "rope_theta": 500000, "context": 16384}
    page = live_page({"model": model, "laws": ["rope"], "lengths": [16384], "rows": []})
    assert setup_of(page)["start"] == {name: model[name] for name in START}


def test_sliders_go_up_and_hold_the_model_that_the_page_opens_with():
    for stops in (LIVE, FILE):
        assert all(values == sorted(set(values)) for values in stops.values())
        assert all(START[name] in stops[name] for name in START)
