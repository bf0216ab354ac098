"""An S3 server on loopback (moto's) that can be slow, answer with errors, cut bodies and refuse credentials."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BUCKET = "corpus"
KEY, SECRET = "AKIAFAKE", "s3cr3t-of-the-store"
_EXPIRED = (
    b"""<?xml version="1.0"?><Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"""
)


@dataclass
class FakeS3:
    """The server. Its faults apply to requests for the contents of objects."""

    url: str = ""
    seconds: float = 0.0
    """How long each request takes."""
    errors: int = 0
    """How many of the next requests are answered with status 503."""
    cuts: int = 0
    """How many of the next answers end in the middle."""
    expired: bool = False
    ranges: list[tuple[str, str]] = field(default_factory=list)
    """Path and range of each request for contents."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, folder: Path, prefix: str = "") -> None:
        """Upload the files of a folder."""
        for file in sorted(one for one in folder.rglob("*") if one.is_file()):
            self.client().put_object(
                Bucket=BUCKET, Key=f"{prefix}{file.relative_to(folder).as_posix()}", Body=file.read_bytes()
            )

    def client(self) -> Any:
        """Return a client of the server."""
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.url, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="us-east-1"
        )

    def wrap(self, application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        """Return the WSGI application with faults."""

        def faulty(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            if environ["REQUEST_METHOD"] not in ("GET", "HEAD") or environ["PATH_INFO"].strip("/") == BUCKET:
                return application(environ, start)
            time.sleep(self.seconds)
            if self.expired:
                start("400 Bad Request", [("Content-Type", "application/xml"), ("Content-Length", str(len(_EXPIRED)))])
                return [_EXPIRED] if environ["REQUEST_METHOD"] == "GET" else []
            if environ["REQUEST_METHOD"] == "HEAD":
                return application(environ, start)
            with self._lock:
                self.ranges.append((environ["PATH_INFO"], environ.get("HTTP_RANGE", "")))
                failing, cut = self.errors > 0, self.cuts > 0
                self.errors, self.cuts = max(self.errors - 1, 0), max(self.cuts - 1, 0) if not failing else self.cuts
            if failing:
                start("503 Slow Down", [("Content-Length", "0")])
                return []
            body = application(environ, start)
            return [b"".join(body)[:-7]] if cut else body

        return faulty


@contextmanager
def running() -> Iterator[FakeS3]:
    """Run a server with an empty bucket until the end of the block."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    fake = FakeS3()
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, fake.wrap(application), threaded=True)
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        fake.client().create_bucket(Bucket=BUCKET)
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(fake: FakeS3, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let this process, and those that it starts, find the server, with credentials from the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", fake.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("TITAN_CACHE_DIR", str(cache))
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
