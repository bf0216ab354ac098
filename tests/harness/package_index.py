"""A package index on this machine that records which packages installers ask it for."""

from __future__ import annotations

import re
import ssl
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import trustme


@dataclass
class PackageIndex:
    """A simple index (PEP 503)."""

    url: str
    asked: list[str] = field(default_factory=list)
    """Names of the packages that were looked up."""
    hosts: list[str] = field(default_factory=list)
    """Other hosts in whose place it answered, as a proxy with the certificate ``authority.pem`` in its folder."""


@contextmanager
def package_index(folder: Path, offered: Mapping[str, list[str]]) -> Iterator[PackageIndex]:
    """Serve empty wheels, written to ``folder``: name -> versions."""
    wheels = {name: [_empty_wheel(folder, name, version) for version in versions] for name, versions in offered.items()}

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            *_, kind, name = self.path.strip("/").split("/")
            if kind == "files":
                self._answer("application/zip", (folder / name).read_bytes())
                return
            index.asked.append(name)
            if name not in wheels:
                self.send_error(404)
                return
            links = "".join(f'<a href="/files/{wheel.name}">{wheel.name}</a>' for wheel in wheels[name])
            self._answer("text/html", f"<!DOCTYPE html><html><body>{links}</body></html>".encode())

        def do_CONNECT(self) -> None:
            """Answer as a proxy, in place of any host to which an installer wants to speak."""
            index.hosts.append(self.path)
            self.send_response(200)
            self.end_headers()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert(self.path.partition(":")[0]).configure_cert(context)
            self.connection = context.wrap_socket(self.connection, server_side=True)
            self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
            self.close_connection = False

        def _answer(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # so that closing it waits for the threads of its requests
    index = PackageIndex(f"http://127.0.0.1:{server.server_port}/simple")
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _empty_wheel(folder: Path, name: str, version: str) -> Path:
    stem = f"{re.sub(r'[-.]+', '_', name)}-{version}"
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return wheel
