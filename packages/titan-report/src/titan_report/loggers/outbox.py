"""Sends JSON over HTTP from a thread, so that training waits neither for a network nor for a server."""

from __future__ import annotations

import http.client
import json
import logging
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0
"""How long a server may take to accept a connection, and between two parts of its answer."""
RETRY_SECONDS = (1.0, 4.0)
"""Waits before a request that failed is sent again."""
_MOST_BYTES = 1 << 20


class DeliveryError(Exception):
    """A request failed. The text names no URL, which may be a secret."""

    def __init__(self, why: str, transient: bool) -> None:
        """
        Args:
            transient: whether the same request may succeed later.
        """
        super().__init__(why)
        self.transient = transient


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would repeat the request without its body, and with its headers, at another host."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


def send_json(url: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], timeout: float) -> dict[str, Any]:
    """POST ``body`` as JSON (GET without a body); return the answer if it is a JSON object, else nothing.

    Raises:
        DeliveryError: the server cannot be reached, or answers with an error.
    """
    data = None if body is None else json.dumps(body, allow_nan=False).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})  # http(s): see config.py
    try:
        with _opener.open(request, timeout=timeout) as response:
            text = response.read(_MOST_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        transient = error.code >= 500 or error.code in (408, 429)
        raise DeliveryError(f"the server answers {error.code}", transient) from None
    except urllib.error.URLError as error:
        why = error.reason
        text_of = (why.strerror or type(why).__name__) if isinstance(why, OSError) else type(why).__name__
        raise DeliveryError(f"the server cannot be reached: {text_of}", True) from None
    except (OSError, http.client.HTTPException) as error:
        raise DeliveryError(f"the connection failed: {type(error).__name__}", True) from None
    try:
        answer = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


class Outbox:
    """Makes deliveries one after another on a thread. Warns when one is lost, and when a later one succeeds."""

    def __init__(self, name: str, capacity: int) -> None:
        """
        Args:
            name: of the receiver, for warnings.
            capacity: number of deliveries that may wait. A further one is dropped.
        """
        self._name = name
        self._waiting: queue.Queue[Callable[[], object] | None] = queue.Queue(capacity)
        self._closed = threading.Event()
        self._is_done = threading.Event()
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name=f"titan-{name}", daemon=True)
        self._thread.start()

    def put(self, deliver: Callable[[], object]) -> None:
        """Call ``deliver`` later, on the thread. If it raises a transient :class:`DeliveryError`, it is called again."""
        try:
            self._waiting.put_nowait(deliver)
        except queue.Full:
            self._lose("it is slower than the run")

    def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the deliveries so far, and make no others."""
        deadline = time.monotonic() + seconds
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            pass  # the thread ends after the delivery that it is making
        else:
            self._is_done.wait(max(0.0, deadline - time.monotonic()))
        self._closed.set()
        if not self._is_done.is_set():
            log.warning("%s: %d messages were not delivered by the end of the run", self._name, self._waiting.qsize() or 1)

    def _run(self) -> None:
        while not self._closed.is_set():
            deliver = self._waiting.get()
            if deliver is None:
                break
            self._deliver(deliver)
        self._is_done.set()

    def _deliver(self, deliver: Callable[[], object]) -> None:
        for wait in (*RETRY_SECONDS, None):
            try:
                deliver()
            except DeliveryError as error:
                # After a loss, the server is probably still away: others must not wait for it each time.
                if wait is None or not error.transient or self._lost or self._closed.wait(wait):
                    self._lose(str(error))
                    return
            except Exception as error:  # noqa: BLE001 - reported; a thread has no caller
                self._lose(f"{type(error).__name__}: {error}")
                return
            else:
                if self._lost:
                    log.warning("%s: works again; %d messages were lost", self._name, self._lost)
                self._lost = 0
                return

    def _lose(self, why: str) -> None:
        if not self._lost:
            log.warning("%s: a message is lost: %s; training continues", self._name, why)
        self._lost += 1
