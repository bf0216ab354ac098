"""A Hugging Face hub on this machine, with the endpoints by which ``huggingface_hub`` downloads a model, and pushes one
(:mod:`harness.fake_hub_uploads`). Files in LFS are on a second server, as on the hub's storage."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from harness.fake_hub_uploads import Uploads

SIGNATURE = "Signature=s3cr3t-signature"
_LFS = (".safetensors", ".model", ".bin")


def commit(name: str) -> str:
    """Return the commit of the main branch of the repository ``name``."""
    return hashlib.sha1(name.encode()).hexdigest()


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]


@dataclass
class FakeHub:
    """Its repositories, its faults, and the requests that it has received."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None
    """Token that it requires."""
    gated: bool = False
    """Whether anyone may list its files, but only that token may download them."""
    cuts: list[int] = field(default_factory=list)
    """Bytes after which the next downloads of files in LFS end, one entry for each."""
    wrong: set[str] = field(default_factory=set)
    """Files that are sent with a flipped byte."""
    status: int | None = None
    """Status of every answer."""
    slow: str | None = None
    """Beginning of the paths whose answers come byte by byte."""
    uploads: Uploads = field(default_factory=Uploads)
    """What was pushed."""
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    storage_url: str = ""

    def downloads(self, name: str) -> list[str]:
        """The ranges that were requested of a file, an empty string for the whole file."""
        asked = [one for one in self.requests if one.path.startswith(f"/storage/{name}") and one.method == "GET"]
        return [one.headers.get("range", "") for one in asked]


@contextmanager
def running(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[FakeHub]:
    """Run a hub until the end of the block."""
    hub = FakeHub({name: dict(files) for name, files in repositories.items()})
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub, storage)) for storage in (False, True)]
    # As on the real hub, files lie on another host: the client takes the metadata from the answer that redirects there.
    hub.url, hub.storage_url = (
        f"http://{host}:{server.server_address[1]}" for host, server in zip(("127.0.0.1", "localhost"), servers, strict=True)
    )
    hub.uploads.url, hub.uploads.storage_url = hub.url, hub.storage_url
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        if (client := sys.modules.get("huggingface_hub")) is not None:
            client.close_session()  # it keeps connections, each of which has a thread of the hub
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()


def use(hub_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process use the hub at ``hub_url``, without waiting between retries, and write what it receives at once."""
    from huggingface_hub import close_session, constants, file_download

    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub_url)
    template = hub_url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    close_session()


def _handler(hub: FakeHub, storage: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(Request(self.command, path, {name.lower(): value for name, value in self.headers.items()}))
            if hub.status is not None:
                self._send(hub.status, b"")
            elif storage:
                name = parse_qs(urlsplit(self.path).query)["repository"][0]
                file = path.removeprefix("/storage/")
                self._content(file, hub.repositories[name][file])
            elif not (hub.gated and path.startswith("/api/")) and not self._allowed():
                return
            elif answer := hub.uploads.get(path, hub.token):
                self._send(*answer)
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                self._listing(found[1], found[2])
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(?:main|[0-9a-f]{40})", path):
                entries = [_entry(path, data) for path, data in hub.repositories[found[1]].items()]
                self._send(200, json.dumps(entries).encode())
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                assert found[2] == commit(found[1])
                self._resolve(found[1], found[3])
            else:
                self._send(404, b"")

        do_HEAD = do_GET

        def do_POST(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(Request(self.command, path, {name.lower(): value for name, value in self.headers.items()}))
            while hub.uploads.stalls:
                time.sleep(0.01)
            fault = hub.uploads.fault(path)
            body = self.rfile.read(fault.after if fault and fault.after else int(self.headers.get("Content-Length", 0)))
            if fault is not None and fault.after is not None:
                self.close_connection = True  # without an answer
            elif fault is not None or hub.status is not None:
                status, says = (fault.status, fault.says) if fault is not None else (hub.status or 0, "")
                self._send(status, b"", {"X-Error-Message": says or None})
            elif storage:
                hub.uploads.objects[path.removeprefix("/upload/")] = body
                self._send(200, b"")
            elif self._allowed():
                self._send(*hub.uploads.post(path, body, hub.repositories))

        do_PUT = do_POST

        def _allowed(self) -> bool:
            if hub.token is None or self.headers.get("Authorization") == f"Bearer {hub.token}":
                return True
            code = "GatedRepo" if hub.gated else None
            self._send(403 if hub.gated and "Authorization" in self.headers else 401, b"", {"X-Error-Code": code})
            return False

        def _listing(self, name: str, revision: str | None) -> None:
            if name not in hub.repositories:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif revision not in (None, "main", commit(name)):
                self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            else:
                files = [{"rfilename": path, "size": len(data)} for path, data in hub.repositories[name].items()]
                self._send(200, json.dumps({"id": name, "sha": commit(name), "siblings": files}).encode())

        def _resolve(self, name: str, path: str) -> None:
            data = hub.repositories[name][path]
            entry = _entry(path, data)
            headers = {"X-Repo-Commit": commit(name), "ETag": f'"{entry["oid"]}"'}
            if path.endswith(_LFS):
                headers["Location"] = f"{hub.storage_url}/storage/{path}?repository={name}&{SIGNATURE}"
                linked = {"X-Linked-Etag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(len(data))}
                self._send(302, b"", headers | linked)
            else:
                self._content(path, data, headers)

        def _content(self, path: str, data: bytes, extra: Mapping[str, str] = {}) -> None:
            if path in hub.wrong:
                data = bytes([data[0] ^ 1]) + data[1:]
            start = int(found[1]) if (found := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
            part, headers = data[start:], dict(extra)
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            cut = hub.cuts.pop(0) if storage and hub.cuts and self.command == "GET" else None
            self._send(206 if start else 200, part, headers, cut)

        def _send(self, status: int, body: bytes, headers: Mapping[str, str | None] = {}, cut: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if value is not None:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD" and hub.slow is not None and self.path.startswith(hub.slow):
                with suppress(OSError):  # the client gives up
                    for byte in body:
                        self.wfile.write(bytes([byte]))
                        threading.Event().wait(0.01)  # sleep is patched: see use()
            elif self.command != "HEAD":
                self.wfile.write(body[:cut])
            self.close_connection = cut is not None

    return Handler


def _entry(path: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob}
    if path.endswith(_LFS):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


@contextmanager
def folders_for_the_hub() -> Iterator[None]:
    """Let a folder stand in for a dataset of the hub."""
    checks = ("local_files.require_hub_name", "huggingface.require_hub_name", "huggingface._require_own_files")
    with ExitStack() as stack:
        for check in checks:
            stack.enter_context(mock.patch(f"titan_data.{check}"))
        yield
