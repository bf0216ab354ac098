"""Messages to a webhook when a run ends, fails or spikes."""

from __future__ import annotations

import os
import re
import socket
import time
from typing import Any

from titan_core.api import Finding, JobContext, RunEnd, hookimpl
from titan_core.api.config.secrets import redact_text
from titan_core.api.config.sections import TrainingSection
from titan_report.config import WebhookKeys, webhook_url
from titan_report.loggers.outbox import TIMEOUT_SECONDS, Outbox, send_json

SPIKES = ("loss spike", "not finite")
"""Kinds of findings that are sent as ``spike``."""
WAITING = 16
"""Messages that may wait for the server. Spikes beyond are dropped."""
END_SECONDS = 5.0
"""How long the end of a run waits for its messages to be delivered."""


class Webhook:
    """Posts a JSON object for each event of ``metrics.webhook_events``. Its ``text`` is one line for people, the key that
    chat services show."""

    def __init__(self, context: JobContext[WebhookKeys]) -> None:
        self._events = context.section.webhook_events
        url = webhook_url(context.section)
        assert url is not None  # checked
        self._url: str = url
        job = context.job
        self._facts: dict[str, Any] = {
            "run": job.dump_folder,
            "model": job.name,
            "host": socket.gethostname(),
            "steps": context.config.section(TrainingSection).steps,
        }
        self._outbox = Outbox("webhook", WAITING)

    @hookimpl
    def titan_finding(self, finding: Finding) -> None:
        """Send a spike."""
        if finding.kind in SPIKES:
            self._send("spike", finding.step, f"{finding.kind}: {finding.message}", kind=finding.kind)

    @hookimpl
    def titan_train_end(self, end: RunEnd) -> None:
        """Send the end or the failure, and wait a moment for its delivery."""
        if end.error is not None:
            why = f"{type(end.error).__name__}: {end.error}".partition("\n")[0]
            self._send("failure", end.step, f"failed: {why}", error=redact_text(why))
        else:
            loss = "" if end.loss is None else f", loss {end.loss:.4f}"
            self._send(
                "end",
                end.step,
                f"{end.reason}{loss}",
                reason=end.reason,
                completed=end.completed,
                loss=end.loss,
                validation_loss=end.validation_loss,
                checkpoint=end.checkpoint,
            )
        self._outbox.close(END_SECONDS)

    def _send(self, event: str, step: int, what: str, **more: Any) -> None:
        if event not in self._events:
            return
        facts = self._facts
        text = redact_text(f"{os.path.basename(facts['run'])}, step {step:,} of {facts['steps']:,}: {what}")
        body = {"text": _plain(text), "event": event, "step": step, "time": time.time(), **facts, **more}
        self._outbox.put(lambda: send_json(self._url, body, {}, TIMEOUT_SECONDS))


def _plain(text: str) -> str:
    """Return ``text``, which may quote a document or a name, without what chat services obey: links, mentions of people and
    channels (``<!channel>``, ``@here``), and markup."""
    return re.sub(r"(?<!\w)@(?=\w)", "@\u200b", text.translate({ord("<"): "\u2039", ord(">"): "\u203a"}))
