"""``hf://`` paths: read from a Hub that is a server on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote

import pytest

pytest.importorskip("huggingface_hub")

ROWS = b"".join(b'{"id": %d}\n' % number for number in range(3000))
FILES = {"data/a.jsonl": ROWS, "data/b.jsonl": ROWS}
COUNT = """import sys, fast_axolotl
for path in sys.argv[1:]:
    print(sum(map(len, fast_axolotl.open_dataset(path, retry_seconds=5))))"""
ENTRIES = [{"type": "file", "path": path, "size": len(ROWS), "oid": path} for path in FILES]
ENTRIES.append({"type": "directory", "path": "data", "oid": "1"})


class Hub(BaseHTTPRequestHandler):
    """The dataset ``me/rows``."""

    def log_message(self, *_: object) -> None:
        return None

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "ETag": '"1"', **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        wanted = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        self.answer(json.dumps([entry for entry in ENTRIES if entry["path"] in wanted]).encode())

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if path.startswith("/datasets/me/rows/resolve/main/"):
            begin, end = map(int, re.findall(r"\d+", self.headers["Range"]))
            part = FILES[path.removeprefix("/datasets/me/rows/resolve/main/")][begin : end + 1]
            self.answer(part, 206, Content_Range=f"bytes {begin}-{end}/{len(ROWS)}")
        elif "/tree/" in path:
            found = [entry for entry in ENTRIES if path.endswith("data") == ("/" in entry["path"])]
            self.answer(json.dumps(found).encode())
        else:
            self.answer(json.dumps({"id": "me/rows", "sha": "0" * 40}).encode())


def test_datasets_of_the_hub_are_read_by_their_paths() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    paths = [f"hf://datasets/me/rows/{name}" for name in ("data/a.jsonl", "data/*.jsonl", "data")]
    # In a process of its own: the address of the Hub is read when its package is imported.
    endpoint = f"http://127.0.0.1:{server.server_port}"
    variables = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", COUNT, *paths]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    server.shutdown()
    server.server_close()
    assert done.stdout.split() == ["3000", "6000", "6000"], done.stderr
