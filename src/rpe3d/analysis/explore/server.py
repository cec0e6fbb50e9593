"""The page's server: two addresses, no files, loopback unless told otherwise.

`/` is the page, `/api/answer?law=...` what it asks (`answer`). Everything it serves is in memory, so no path leads
anywhere else. Names that are not this machine's are refused: a web site could point its own name at it
and read what is served here.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from rpe3d import __version__
from rpe3d.analysis.explore.answer import answer
from rpe3d.config import ConfigError, whole

LONGEST = 2048  # characters of an address


class Server(ThreadingHTTPServer):
    """A server of the page and its answers at one address."""

    daemon_threads = True

    def __init__(self, page: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self.page = page.encode(errors="backslashreplace")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, whole("port", port, least=0, most=65535)), Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}", "pass another --port, or 0 for any free one"
            ) from None

    @property
    def url(self) -> str:
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"

    def known(self, name: str) -> bool:
        """Return whether a request names this server: a loopback name, or any plain address if it listens to others."""
        if name == "localhost":
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not ip_address(str(self.server_address[0])).is_loopback

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnects."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Handler of GET and HEAD; the base class refuses other methods and invalid requests."""

    server: Server
    server_version, sys_version = f"rpe3d/{__version__}", ""
    timeout = 20

    def do_GET(self) -> None:
        try:
            address = urlsplit(self.path)
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            return self._say(HTTPStatus.BAD_REQUEST, "no valid host", "open the address that the command printed")
        if not self.server.known(host):
            return self._say(HTTPStatus.FORBIDDEN, f"this is not {host or 'nobody'}", "open http://127.0.0.1 instead")
        if len(self.path) > LONGEST:
            return self._say(HTTPStatus.REQUEST_URI_TOO_LONG, "the address is too long", "ask for one law at a time")
        if address.path == "/":
            return self._send(HTTPStatus.OK, "text/html", self.server.page)
        if address.path == "/api/answer":
            return self._answer(address.query)
        return self._say(HTTPStatus.NOT_FOUND, "there is nothing here", "the page is at /")

    do_HEAD = do_GET

    def _answer(self, query: str) -> None:
        try:
            pairs = parse_qsl(query, strict_parsing=True, keep_blank_values=True, max_num_fields=16)
            content = _cached(tuple(sorted(dict(pairs).items())))
        except ConfigError as refusal:
            return self._say(HTTPStatus.BAD_REQUEST, refusal.problem, refusal.hint)
        except ValueError:
            return self._say(
                HTTPStatus.BAD_REQUEST, "the question cannot be read", "ask as ?law=3d-rpe&context=65536&..."
            )
        return self._send(HTTPStatus.OK, "application/json", content)

    def _say(self, status: HTTPStatus, problem: str, hint: str) -> None:
        self._send(status, "application/json", _json({"error": {"problem": problem, "hint": hint}}))

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the page asks with every move of a slider."""


@lru_cache(maxsize=256)
def _cached(question: tuple[tuple[str, str], ...]) -> bytes:
    return _json(answer(dict(question)))


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
