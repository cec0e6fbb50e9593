"""The page in a real browser: no error, no address of others, every slider at work, the link, the copied code, access.

Needs Chromium (or $CHROMIUM, the path of one); it is skipped where there is none.
"""

from __future__ import annotations

import threading

import chromium
import pytest
import torch

from rpe3d import make_law
from rpe3d.analysis.explore.page import FILE, file_page, live_page
from rpe3d.analysis.explore.server import Server
from rpe3d.config import ConfigError

PROGRAM = chromium.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on the path, nor in $CHROMIUM")
ROWS = [
    {"law": law, "length": 4096, "ppl": 20.0 + n, "tail_ppl": 21.0 + n, "copy_nll": 0.5, "passkey": n, "passkey_n": 2,
     "position": [256, 1024, 4000], "perplexity": [30.0, 20.0, 20.0 + n]}
    for n, law in enumerate(("rope", "3d-rpe", "tuned"))
]  # fmt: skip
MEASURED = {
    "model": {"name": "tiny", "pretrained": 2048, "head_dim": 64, "rope_theta": 10000, "context": 4096},
    "laws": ["rope", "3d-rpe", "tuned"], "lengths": [4096], "rows": ROWS,
}  # fmt: skip
SIZES = [(380, False), (380, True), (1440, False), (1440, True)]
PICTURES = (
    "a-globe",
    "b-globe",
    "a-grid",
    "shown",
    "strips",
    "bound",
    "resolution",
    "cost",
    "a-code",
    "a-head",
    "readout",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made = chromium.Browser(PROGRAM, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def server():
    with Server(live_page()) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "page.html"
    stops = {name: values[:1] for name, values in FILE.items()}
    path.write_text(file_page(MEASURED, stops | {"chunk": [256, 700], "context": [16384, 32768]}), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(browser, server):
    made = chromium.Page(browser)
    made.open(server.url)
    return made


def move(page, name, value):
    """Set a control as a hand does, and wait for the page."""
    kind = "change" if name.endswith("law") else "input"
    at_once = "true" if name in ("token", "turn") else "false"
    page.run(
        f"(() => {{ const it = document.getElementById({name!r}); it.value = {str(value)!r};"
        f" document.body.dataset.ready = {at_once} ? 'yes' : 'asked';"
        f" it.dispatchEvent(new Event({kind!r}, {{ bubbles: true }})) }})()"
    )
    page.settle()


def drawn(page):
    """What every picture shows now, as text."""
    return {
        name: page.run(
            f"(() => {{ const it = document.getElementById({name!r}); return !it ? null :"
            " it.tagName === 'CANVAS' ? it.toDataURL() : it.innerHTML })()"
        )
        for name in PICTURES
    }


def troubles(page):
    said = [e for e in page.events("Runtime.consoleAPICalled") if e["type"] in ("error", "warning", "assert")]
    return [*said, *page.events("Runtime.exceptionThrown"), *page.events("Log.entryAdded")]


@pytest.mark.parametrize("which", ["live", "file"])
def test_it_loads_without_an_error_and_asks_nobody_else(browser, server, file, which):
    page = chromium.Page(browser, still=False)
    address = server.url if which == "live" else file
    page.open(address)
    for law in ("yarn", "streaming-llm", "dpe"):
        move(page, "a-law", law)
    assert troubles(page) == []
    asked = [event["request"]["url"] for event in page.events("Network.requestWillBeSent")]
    assert asked
    assert all(url.startswith((address.split("#")[0], "data:")) for url in asked)
    assert page.run("document.getElementById('play').textContent") == "Pause"


@pytest.mark.parametrize(
    ("slider", "value", "changes", "keeps"),
    [
        ("pretrained", 3, {"a-globe", "shown", "strips", "a-grid", "a-head"}, {"a-code"}),
        ("context", 8, {"a-globe", "shown", "strips", "a-grid", "bound", "a-code", "cost", "readout"}, set()),
        ("head_dim", 4, {"bound", "cost"}, {"a-code", "shown", "a-grid"}),
        ("rope_theta", 0, {"bound", "b-globe"}, {"a-code", "cost", "shown", "a-grid"}),
        ("a-chunk", 9, {"a-globe", "shown", "a-grid", "a-code", "cost", "a-head"}, {"b-globe"}),
        ("a-window", 21, {"a-globe", "shown", "a-grid", "a-code", "a-head"}, {"b-globe"}),
        ("a-reach", 23, {"a-globe", "shown", "a-grid", "a-code"}, {"b-globe", "strips"}),
        ("a-focus", 3, {"a-code", "a-head"}, {"a-globe", "shown", "b-globe", "strips"}),
        ("a-fade", 1, {"a-code", "a-head"}, {"a-globe", "shown", "b-globe", "strips"}),
        ("a-far", 4, {"a-code", "a-head"}, {"a-globe", "shown", "b-globe"}),
        ("a-law", "dca", {"a-globe", "shown", "a-grid", "a-code", "cost", "a-head"}, {"b-globe"}),
        ("b-law", "linear", {"b-globe", "shown", "strips", "resolution"}, {"a-globe", "a-code"}),
        ("b-law", "", {"b-globe", "shown", "cost"}, {"a-code"}),
        ("token", 800, {"a-globe", "b-globe", "a-grid", "readout"}, {"a-code", "cost", "a-head"}),
        ("turn", 90, {"a-globe", "b-globe"}, {"a-grid", "shown", "readout", "a-code"}),
        ("plane-exact", 30, {"a-globe", "b-globe"}, {"shown", "bound", "a-code"}),
    ],
)
def test_every_slider_changes_what_it_should_and_nothing_else(page, slider, value, changes, keeps):
    before = drawn(page)
    move(page, slider, value)
    after = drawn(page)
    assert {name for name in changes if before[name] == after[name]} == set()
    # Clip paths are numbered through, so pictures that are drawn again differ there.
    plain = {name: [chromium.numberless(text) for text in (before[name], after[name])] for name in keeps}
    assert {name for name, (old, new) in plain.items() if old != new} == set()
    assert troubles(page) == []


def test_an_exact_number_can_be_typed_and_a_law_that_cannot_be_is_explained_not_drawn(page):
    move(page, "a-window-exact", 1000)
    with pytest.raises(ConfigError) as refusal:
        make_law("3d-rpe", pretrained=8192, context=65536, head_dim=64, rope_theta=1e5, window=1000)
    words = page.run("document.querySelector('#a-head[role=alert]').innerText")
    assert refusal.value.problem in words
    assert refusal.value.hint in words
    assert page.run("document.getElementById('a-globe')") is None
    assert page.run("document.getElementById('a-code')") is None
    assert page.run("document.getElementById('b-globe').width") > 100
    move(page, "a-window-exact", 1024)
    assert page.run("document.querySelector('[role=alert]')") is None
    assert page.run("document.getElementById('a-code').textContent").endswith("context=65536, window=1024)")
    assert troubles(page) == []


def test_a_server_that_is_gone_is_said(browser):
    with Server(live_page()) as gone:
        thread = threading.Thread(target=gone.serve_forever, daemon=True)
        thread.start()
        page = chromium.Page(browser)
        page.open(gone.url)
        gone.shutdown()
        thread.join()
    move(page, "context", 5)
    assert "the server does not answer" in page.run("document.getElementById('heads').innerText")


def test_the_link_restores_the_state(browser, server, page):
    for slider, value in (("context", 7), ("a-law", "dca"), ("a-chunk", 14), ("b-law", "yarn"), ("turn", -60)):
        move(page, slider, value)
    move(page, "token", 640)
    address = page.run("location.href")
    assert "#" in address
    other = chromium.Page(browser)
    other.open(address)
    values = "[...document.querySelectorAll('input, select, output')].map((it) => [it.id, it.value])"
    assert other.run(values) == page.run(values)
    assert {n: chromium.numberless(t) for n, t in drawn(other).items()} == {
        n: chromium.numberless(t) for n, t in drawn(page).items()
    }
    assert other.run("location.href") == address


@pytest.mark.parametrize(
    "nonsense", ["#a=nothing&context=x", "#pretrained=-5&b=%3Cscript%3E", "#plane=9999", "#token=1e99&turn=NaN", "#%"]
)
def test_a_broken_link_opens_a_page_all_the_same(browser, server, nonsense):
    page = chromium.Page(browser)
    page.open(server.url + nonsense)
    assert page.run("document.getElementById('heads').children.length") >= 1
    assert troubles(page) == []


def test_the_copied_code_and_command_run(browser, server, page, tmp_path, monkeypatch, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    from rpe3d import law_of
    from rpe3d.cli import main

    for slider, value in (("pretrained-exact", 512), ("context-exact", 4096), ("a-chunk-exact", 32)):
        move(page, slider, value)
    browser.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.send("Page.bringToFront")
    copied = []
    for button in ("call", "command"):
        page.run(f"document.querySelector('[aria-label=\"Copy the {button} for 3d-rpe\"]').click()")
        copied.append(page.run("new Promise((f) => setTimeout(f, 200)).then(() => navigator.clipboard.readText())"))
    assert page.run("document.getElementById('said').textContent") == "Copied."
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=512, **sizes))
    model.save_pretrained(tmp_path / "model")
    exec(copied[0], {"model": model})
    law = law_of(model)
    assert (law.name, law.context, law.chunk) == ("3d-rpe", 4096, 32)
    words = copied[1].replace("MODEL", str(tmp_path / "model")).replace("DIR", str(tmp_path / "long")).split()
    assert words[0] == "rpe3d"
    assert main(words[1:]) == 0
    assert (tmp_path / "long" / "config.json").is_file()


def test_a_file_draws_what_the_server_draws(browser, server, file):
    """One page, two sources of the same answers."""
    state = "#pretrained=4096&context=16384&head_dim=64&rope_theta=10000&a=3d-rpe&a.chunk=256&b=dca&token=500"
    pages = [chromium.Page(browser) for _ in range(2)]
    for page, address in zip(pages, (server.url, file), strict=True):
        page.open(address + state)
    live, saved = ({n: chromium.numberless(t) for n, t in drawn(page).items()} for page in pages)
    assert live == saved
    move(pages[1], "a-chunk", 2)
    assert pages[1].run("document.getElementById('a-code').textContent").endswith("chunk=700)")
    move(pages[1], "context", 1)
    assert "32768" in pages[1].run("document.getElementById('b-code').textContent")
    assert troubles(pages[1]) == []


def test_measured_curves_are_shown_where_there_are_results(browser, file):
    page = chromium.Page(browser)
    page.open(file)
    assert page.run("document.getElementById('measured').hidden") is False
    assert page.run("document.querySelectorAll('#perplexity .curve').length") == 3
    cells = page.run(
        "[...document.querySelectorAll('#rows tr')].map((row) => [...row.children].map((c) => c.innerText))"
    )
    assert cells[1:] == [
        ["rope", "20.00", "21.00", "0.50", "0/2"],
        ["3d-rpe", "21.00", "22.00", "0.50", "1/2"],
        ["tuned", "22.00", "23.00", "0.50", "2/2"],
    ]


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_nothing_overflows(browser, server, file, width, dark):
    for address in (server.url, file):
        page = chromium.Page(browser, width=width, dark=dark)
        page.open(address + "#a=3d-rpe-dual-chunk&b=leaky-rerope")
        assert page.run("document.documentElement.scrollWidth") <= width
        outside = page.run(
            "[...document.querySelectorAll('body *')].filter((it) => !it.closest('.wide, .skip, clipPath, pattern') &&"
            " it.getClientRects().length && it.getBoundingClientRect().right > innerWidth + 1).map((it) => it.tagName)"
        )
        assert outside == []


@pytest.mark.parametrize("dark", [False, True])
def test_every_word_has_enough_contrast(browser, server, dark):
    """WCAG 2.1 AA: 4.5 to 1, with the background that lies behind each text."""
    page = chromium.Page(browser, dark=dark)
    page.open(server.url + "#a=3d-rpe&a.window=700&b=dca")
    weak = page.run(chromium.WEAK_TEXT)
    assert weak == []


def test_every_control_and_picture_has_a_name_and_headings_go_in_order(page):
    """Chromium's own accessibility tree, which is what a screen reader gets."""
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    roles = ("slider", "spinbutton", "combobox", "button", "image", "img", "link", "textbox")
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in roles
    ]
    assert len(named) > 25
    assert [role for role, name in named if not name.strip()] == []
    levels = page.run("[...document.querySelectorAll('h1, h2, h3')].map((it) => Number(it.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    ids = page.run("[...document.querySelectorAll('[id]')].map((it) => it.id)")
    assert len(ids) == len(set(ids))
    assert page.run("document.documentElement.lang") == "en"


def test_it_can_be_used_with_the_keyboard_alone(page):
    """Tab reaches every control in turn, arrows move a slider, space starts the walk."""
    reached = []
    for _ in range(60):
        page.press("Tab", 9)
        name = page.run("document.activeElement.id || document.activeElement.tagName")
        if reached and name == "BODY":
            break
        reached.append(name)
    assert {
        "pretrained",
        "context",
        "head_dim",
        "rope_theta",
        "a-law",
        "a-chunk",
        "a-window",
        "a-reach",
        "b-law",
    } <= set(reached)
    assert {"token", "turn", "play", "link"} <= set(reached)
    before = page.run("document.getElementById('a-code').textContent")
    page.run("document.getElementById('context').focus()")
    page.run("void (document.body.dataset.ready = 'asked')")
    page.press("ArrowRight", 39)
    page.settle()
    assert page.run("document.getElementById('a-code').textContent") != before
    page.run("document.getElementById('play').focus()")
    page.press(" ", 32)
    assert page.run("document.getElementById('play').getAttribute('aria-pressed')") == "true"
    outline = page.run("getComputedStyle(document.getElementById('play')).outlineStyle")
    assert outline != "none", "what has the focus is seen"


def test_motion_waits_for_those_who_asked_for_stillness(browser, server):
    for still, said in ((True, "Play"), (False, "Pause")):
        page = chromium.Page(browser, still=still)
        page.open(server.url)
        assert page.run("document.getElementById('play').textContent") == said
