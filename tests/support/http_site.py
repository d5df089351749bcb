"""A real HTTP server on a loopback port that fails as it is told, request by request."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fsspec


@dataclass
class Site:
    """What the server serves, how it fails, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """One for each GET to come: a name below, or ``""`` for an answer as it should be."""
    always: str = ""
    """The fault of every GET once ``faults`` is used up."""
    refused: set[str] = field(default_factory=set)
    with_tags: bool = True
    """Whether answers carry an ETag, or else the time of the last change."""
    changed: float = 1e9
    """That time."""
    requests: list[tuple[str, int, int]] = field(default_factory=list)
    """The path, first byte and length of every GET."""
    slow_seconds: float = 0.0
    url: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(length for _, _, length in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body would wait 40 ms until its headers are acknowledged
    site: Site

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        return None

    def _refuse(self, status: int, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", "0")):
            self.send_header(name, value)
        self.end_headers()

    def _answer(self, *, with_body: bool) -> None:
        site, name = self.site, self.path.partition("?")[0]
        fault = ""
        if with_body:
            fault = site.faults.pop(0) if site.faults else site.always
        if self.path in site.refused or fault == "403":
            return self._refuse(403)
        if name not in site.files:
            return self._refuse(404)
        if fault.isdigit():
            return self._refuse(int(fault), ("Retry-After", "7"))
        data = site.files[name]
        tag, changed = f'"{sha256(data).hexdigest()[:16]}"', formatdate(site.changed, usegmt=True)
        expected = {"If-Match": tag} if site.with_tags else {"If-Unmodified-Since": changed}
        if any(self.headers.get(name, value) != value for name, value in expected.items()):
            return self._refuse(412)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        stop = min(len(data), int(asked[2]) + 1) if asked and asked[2] else len(data)
        if start >= stop and asked:
            return self._refuse(416)
        is_part = asked is not None and fault != "no ranges"
        body = data[start:stop] if is_part else data
        if with_body:
            site.requests.append((name, start, len(body)))
        if fault == "short":
            body = body[:-1]
        elif fault == "long":
            body += b"?"
        self.send_response(206 if is_part else 200)
        self.send_header("Content-Length", str(len(body)))
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header(*(("ETag", tag) if site.with_tags else ("Last-Modified", changed)))
        self.end_headers()
        if not with_body:
            return None
        if fault == "reset":  # the client sees ECONNRESET, not an early end
            self.wfile.write(body[: len(body) // 2])
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            os.close(self.connection.detach())
        elif fault in ("drop", "hang", "slow"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.close_connection = True
            if fault != "drop":
                time.sleep(site.slow_seconds)
            if fault == "slow":
                self.wfile.write(body[len(body) // 2 :])
        else:
            self.wfile.write(body)
        return None


@contextmanager
def s3_bucket(bucket: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """moto's server with an empty bucket: the file system, and what a client needs to reach it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options: dict[str, Any] = {"key": "testing", "secret": "testing-secret"}
    options |= {"endpoint_url": f"http://{host}:{port}"}
    options |= {"client_kwargs": {"region_name": "us-east-1"}}
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True, **options)
    filesystem.call_s3("create_bucket", Bucket=bucket)
    yield filesystem, options
    server.stop()


@contextmanager
def http_site() -> Iterator[Site]:
    site = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": site}))
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield site
    server.shutdown()
    server.server_close()
