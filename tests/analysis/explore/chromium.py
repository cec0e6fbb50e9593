"""A real browser for tests: Chromium without a window, spoken to in the DevTools protocol through a pipe."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find():
    """The browser that $CHROMIUM names or that is on the path; None where there is none."""
    given = os.environ.get("CHROMIUM")
    return given or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with pages in it. Messages end with a zero byte and go through descriptors 3 and 4."""

    def __init__(self, program, folder):
        asked, self._write = os.pipe()
        self._read, answered = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        flags += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}"]

        def connect():
            spare = os.dup(asked), os.dup(answered)
            os.dup2(spare[0], 3)
            os.dup2(spare[1], 4)
            os.set_inheritable(3, True)
            os.set_inheritable(4, True)

        self._process = subprocess.Popen(
            [program, *flags, "--remote-debugging-pipe", "about:blank"],
            close_fds=False, preexec_fn=connect, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(asked)
        os.close(answered)
        self._last, self._buffer, self.events = 0, b"", []

    def send(self, method, session=None, **parameters):
        """The result of one command; events that arrive meanwhile are kept."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self):
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser has ended"
            self._buffer += piece
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def close(self):
        self._process.terminate()
        self._process.wait(20)
        os.close(self._read)
        os.close(self._write)


class Page:
    """A tab at one size and in one colour scheme. It has to be opened at an address."""

    def __init__(self, browser, width=1440, height=900, dark=False, still=True):
        self.browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.size(width, height)
        self.media(dark, still)

    def send(self, method, **parameters):
        return self.browser.send(method, self.session, **parameters)

    def size(self, width, height):
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, dark, still=True):
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        features.append({"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"})
        self.send("Emulation.setEmulatedMedia", features=features)

    def open(self, address):
        self.send("Page.navigate", url=address)
        self.settle()

    def run(self, script):
        """The value of an expression in the page."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def settle(self, seconds=30):
        """Wait until the page has drawn what it was asked for."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.12)
            if self.run("document.readyState === 'complete' && document.body?.dataset.ready") == "yes":
                return
        raise AssertionError("the page did not get ready")

    def events(self, method):
        """What happened in this tab, of one kind."""
        return [
            e["params"] for e in self.browser.events if e["method"] == method and e.get("sessionId") == self.session
        ]

    def picture(self, path, full=True):
        content = self.send("Page.captureScreenshot", captureBeyondViewport=full, format="png")
        path.write_bytes(base64.b64decode(content["data"]))

    def press(self, key, code):
        """One key down and up."""
        text = key if len(key) == 1 else ""
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)


def numberless(text):
    """A picture without the numbers of its clip paths and hatches, which count through."""
    return None if text is None else re.sub(r"(clip|hatch)-\d+", r"\1", text)


# Every text whose contrast with what lies behind it is below 4.5, or below 3 where it is large.
WEAK_TEXT = """(() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n };
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(c[i] / 255), 0);
  const behind = (it) => { for (let at = it; at; at = at.parentElement) {
      const c = parse(getComputedStyle(at).backgroundColor); if (c[3] === 1) return c }
    return [255, 255, 255, 1] };
  const weak = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const it = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || ["SCRIPT", "STYLE", "OPTION"].includes(it.tagName)) continue;
    if (!it.getClientRects().length) continue;
    const style = getComputedStyle(it);
    const ink = parse(it instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(ink.slice(0, 3)), light(behind(it).slice(0, 3))].sort((x, y) => x - y);
    const ratio = (b + 0.05) / (a + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) weak.push([walker.currentNode.data.trim(), ratio]);
  }
  return weak;
})()"""
