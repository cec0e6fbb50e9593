"""The server: two addresses, this machine only, and nothing that a request can say brings it down."""

from __future__ import annotations

import http.client
import json
import socket
import threading

import pytest

from rpe3d.analysis.explore.answer import answer
from rpe3d.analysis.explore.server import Server
from rpe3d.config import ConfigError

QUESTION = "law=3d-rpe&pretrained=512&context=4096&head_dim=32&rope_theta=10000"


@pytest.fixture(scope="module")
def server():
    with Server("<!DOCTYPE html>the page") as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type"), response.read()
    finally:
        connection.close()


def say(server, text):
    """Raw bytes, and what comes back until the server closes."""
    with socket.create_connection(server.server_address[:2], timeout=30) as connection:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        answered = b""
        while piece := connection.recv(65536):
            answered += piece
    return answered


def test_it_listens_to_this_machine_alone_by_default(server):
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"


def test_it_serves_the_page_and_answers(server):
    assert ask(server, "/") == (200, "text/html; charset=utf-8", b"<!DOCTYPE html>the page")
    status, kind, body = ask(server, f"/api/answer?{QUESTION}")
    assert (status, kind) == (200, "application/json; charset=utf-8")
    asked = dict(pair.split("=") for pair in QUESTION.split("&"))
    assert json.loads(body) == json.loads(json.dumps(answer(asked)))
    assert ask(server, "/", "HEAD") == (200, "text/html; charset=utf-8", b"")


def test_a_law_that_cannot_be_is_an_answer(server):
    """Not an error of the request: the page explains it, and the browser's console stays empty."""
    status, _, body = ask(server, f"/api/answer?{QUESTION}&window=100")
    assert status == 200
    assert json.loads(body)["error"]["problem"] == "window is 100, not a multiple of chunk 32"


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page.js", "/api", "/api/answer/x", "/..",
     "/api/../page.py", "/\\..\\x", "/favicon.ico"],
)  # fmt: skip
def test_there_is_nothing_else(server, path):
    status, _, body = ask(server, path)
    assert status == 404
    assert json.loads(body)["error"]["problem"] == "there is nothing here"


@pytest.mark.parametrize(
    "query",
    ["", "law", "law=3d-rpe", "law=rope&colour=red", "&&&", "=", "%ff%fe=1", "law=" + "&x=1" * 30, QUESTION + "&x=1"],
)
def test_a_question_that_is_none_is_400_and_says_why(server, query):
    status, _, body = ask(server, f"/api/answer?{query}")
    assert status == 400
    assert json.loads(body)["error"]["hint"]


@pytest.mark.parametrize(
    "value", ["nan", "inf", "-1", "1e999", "-" + "9" * 15, "9" * 400, "0x10", "1_000", "%00", "", "½"]
)
@pytest.mark.parametrize("name", ["context", "head_dim", "rope_theta", "chunk", "plane"])
def test_a_strange_number_is_refused_and_nothing_breaks(server, name, value):
    from urllib.parse import quote

    asked = dict(pair.split("=") for pair in QUESTION.split("&")) | {name: value}
    query = "&".join(f"{key}={quote(text, safe='%')}" for key, text in asked.items())
    status, _, body = ask(server, f"/api/answer?{query}")
    assert status == 200
    assert json.loads(body)["error"]["problem"]


def test_an_address_of_another_server_is_refused(server):
    assert ask(server, "http://example.com/")[0] == 403


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1.example.com", "10.1.2.3", "", "[::1", "localhost.evil"])
def test_a_name_that_is_not_this_machine_s_is_refused(server, host):
    """DNS rebinding: a web site that points its own name at 127.0.0.1 must not read what is here."""
    status, _, body = ask(server, "/", Host=host)
    assert status in (400, 403)
    assert b"the page" not in body


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8765"])
def test_the_names_of_this_machine_are_known(server, host):
    assert ask(server, "/", Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_other_methods_are_refused(server, method):
    assert ask(server, "/", method)[0] == 501


@pytest.mark.parametrize(
    "text",
    [b"\r\n\r\n", b"nonsense\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\xfc\x03",
     b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n",
     b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"GET // HTTP/1.1\r\nHost: [\r\n\r\n", b""],
)  # fmt: skip
def test_it_survives_what_is_no_request(server, text):
    answered = say(server, text)
    assert b"the page" not in answered
    assert ask(server, "/")[0] == 200


def test_an_address_that_is_too_long_is_refused(server):
    assert ask(server, f"/api/answer?{QUESTION}&plane={'1' * 3000}")[0] == 414


def test_a_client_that_goes_away_disturbs_nobody(server, capfd):
    for _ in range(5):
        connection = socket.create_connection(server.server_address[:2])
        connection.sendall(f"GET /api/answer?{QUESTION} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.close()
    assert ask(server, "/")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_port_that_is_taken_is_one_clear_error(server):
    with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+: Address already in use"):
        Server("page", port=server.server_address[1])
    with pytest.raises(ConfigError, match="port is 70000"):
        Server("page", port=70000)
