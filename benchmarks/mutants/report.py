"""Mistakes in reports of runs."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

REPORT, CONTENTS, WATCH, COMPARE, MFU = (
    "tests/report/test_report.py",
    "tests/report/test_report_contents.py",
    "tests/report/test_watch.py",
    "tests/report/test_compare.py",
    "tests/report/test_mfu.py",
)
ATTEMPTS, AXES = "report/attempts.py", "report/page.py"
OUTBOX, WEBHOOK, MLFLOW = "report/loggers/outbox.py", "tests/report/test_webhook.py", "tests/report/test_mlflow.py"
GOODPUT_PY, GOODPUT = "report/goodput.py", "tests/report/test_goodput.py"

MUTANTS = (
    Mutant("attempts-end-with-the-next", ATTEMPTS, "if began <= sign < limit)", "if began <= sign <= limit)", (CONTENTS, REPORT)),
    Mutant("finished-runs-have-ended", ATTEMPTS, 'if end.get("completed"):', "if False:", (CONTENTS, REPORT)),
    Mutant("replaced-attempts-run", ATTEMPTS, "if attempt.replaced or processes_are_gone", "if processes_are_gone", (CONTENTS, REPORT)),
    Mutant("slow-runs-are-stalled", ATTEMPTS, "max(QUIET_AT_LEAST, pace)", "QUIET_AT_LEAST", (WATCH,)),
    Mutant("compiling-runs-are-stalled", ATTEMPTS, "QUIET_AT_FIRST if pace is None", "QUIET_AT_LEAST if pace is None", (WATCH,)),
    Mutant("pace-ignores-checkpoints", ATTEMPTS, "max(10 * statistics.median(gaps), 2 * max(gaps))", "10 * statistics.median(gaps)", (CONTENTS, WATCH)),
    Mutant("hours-with-pauses", AXES, "sum(min(attempt.last, time) - attempt.began", "sum(time - attempt.began", (CONTENTS, REPORT)),
    Mutant("positions-not-interpolated", AXES, "low + (high - low) * (step - first) / (last - first)", "low", (CONTENTS, REPORT)),
    Mutant("infinities-are-drawn", "report/shown.py", " and math.isfinite(value)", "", (CONTENTS,)),
    Mutant("secrets-in-differences", "report/config_differences.py", "masked = [flatten(redact(run.config)) for run in runs]", "masked = flat", (REPORT, CONTENTS)),
    Mutant("equal-keys-listed", "report/config_differences.py", "{_shown(config, key) for config in flat}) > 1", "{_shown(config, key) for config in flat}) > 0", (REPORT, CONTENTS)),
    Mutant("best-validation-is-the-worst", "report/summary.py", 'best = min(_known(run.validations, "validation_loss")', 'best = max(_known(run.validations, "validation_loss")', (REPORT, CONTENTS)),
    Mutant("a-last-loss-of-nan-hidden", "report/summary.py", "value = finite(records[-1].get(key))", "value = next((one for record in reversed(records) if (one := finite(record.get(key))) is not None), None)", (REPORT, CONTENTS)),
    Mutant("wall-time-of-the-last-attempt", "report/summary.py", "duration(sum(attempt.seconds for attempt in attempts) if attempts else None)", "duration(attempts[-1].seconds if attempts else None)", (REPORT, CONTENTS)),
    Mutant("hours-of-the-day-lost", "core/toolkit/text.py", 'f"{days} d {hours % 24} h"', 'f"{days} d {hours} h"', (CONTENTS,)),
    Mutant("only-known-metrics-drawn", "report/charts.py", 'if "/" in key and not key.startswith(_COUNTS))', 'if key.startswith(("objective/", "auxiliary/")))', (CONTENTS,)),
    Mutant("unfinished-retries-hidden", "report/charts.py", "retries = sum(max(", "retries = sum(min(", (CONTENTS,)),
    Mutant("goodput-without-ranks", GOODPUT_PY, "length = ranks * max(", "length = max(", (GOODPUT,)),
    Mutant("goodput-loses-no-steps", GOODPUT_PY, "    if lost > 0:", "    if lost < 0:", (GOODPUT,)),
    Mutant("goodput-loses-whole-events", GOODPUT_PY, "return less + (more - less) * (step - first) / (last - first)", "return less", (GOODPUT,)),
    Mutant("goodput-resumes-from-the-next-attempt", GOODPUT_PY, 'resumed = min((int(each.start["step"]) for each in later), default=None)', 'resumed = next((int(each.start["step"]) for each in later), None)', (GOODPUT,)),
    Mutant("goodput-counts-what-follows-a-failure-twice", GOODPUT_PY, ' and float(event["time"]) <= ended]', "]", (GOODPUT,)),
    Mutant("goodput-restarts-are-starts", GOODPUT_PY, "again = number > 0 or", "again = number < 0 or", (GOODPUT,)),
    Mutant("goodput-of-kills-that-lose-nothing", GOODPUT_PY, '"lost" if attempt.replaced and not clean else "steps"', '"steps"', (GOODPUT,)),
    Mutant("goodput-ends-with-the-last-line", GOODPUT_PY, "return begun if _was_restarted(following) else min(attempt.last, begun)", "return min(attempt.last, begun)", (GOODPUT,)),
    Mutant("goodput-of-older-runs", GOODPUT_PY, 'if not any(event.get("launched") == first["launched"]', 'if not any(event.get("launched") != first["launched"]', (GOODPUT,)),
    Mutant("goodput-of-what-is-known", GOODPUT_PY, "None if NOT_RECORDED in seconds or not self.wall else", "None if not self.wall else", (GOODPUT,)),
    Mutant("goodput-sums-unchecked", GOODPUT_PY, "if abs(spent.difference) > TOLERANCE:", "if abs(spent.difference) > 1:", (GOODPUT,)),
    Mutant("outbox-follows-redirects", OUTBOX, "build_opener(_NoRedirect)", "build_opener()", (WEBHOOK,)),
    Mutant("outbox-waits-when-full", OUTBOX, "self._waiting.put_nowait(deliver)", "self._waiting.put(deliver)", (WEBHOOK,)),
    Mutant("outbox-gives-up-at-once", OUTBOX, "error.code >= 500 or", "error.code > 599 or", (WEBHOOK,)),
    Mutant("outbox-repeats-refusals", OUTBOX, "if wait is None or not error.transient or", "if wait is None or", (WEBHOOK,)),
    Mutant("outbox-waits-without-end", OUTBOX, "self._is_done.wait(max(0.0, deadline - time.monotonic()))", "self._is_done.wait()", (WEBHOOK,)),
    Mutant("outbox-leaves-without-waiting", OUTBOX, "self._is_done.wait(max(0.0, deadline - time.monotonic()))", "pass", (WEBHOOK,)),
    Mutant("webhook-tells-secrets-of-errors", "report/loggers/webhook.py", "error=redact_text(why)", "error=why", (WEBHOOK,)),
    Mutant("webhook-sends-everything", "report/loggers/webhook.py", "if finding.kind in SPIKES:", "if finding.kind:", (WEBHOOK,)),
    Mutant("webhook-url-of-any-kind", "report/config.py", 'parts.scheme in ("http", "https") and', "", (WEBHOOK,)),
    Mutant("mlflow-forgets-the-beginning", "report/loggers/mlflow.py", "            self._begin()\n", "            self._run_id or self._begin()\n", (MLFLOW,)),
    Mutant("mlflow-failures-finish", "report/loggers/mlflow.py", '"FAILED" if end.failed else', '"FINISHED" if end.failed else', (MLFLOW,)),
    Mutant("mlflow-long-parameters", "report/loggers/mlflow.py", "str(value)[:_LONGEST_PARAM]", "str(value)", (MLFLOW,)),
    Mutant("mlflow-tells-secrets", "report/loggers/mlflow.py", "flatten(redact(run.job.config.as_dict()))", "flatten(run.job.config.as_dict())", (MLFLOW,)),
    Mutant("curves-upside-down", "report/dashboard.py", "round((1 - share) * (height - 1))", "round(share * (height - 1))", (WATCH,)),
    Mutant("gaps-are-bridged", "report/dashboard.py", "            before = None\n            continue\n", "            continue\n", (WATCH,)),
    Mutant("rewinds-unlisted", "report/timeline.py", "    moments += [Moment(\"rewind\"", "    [Moment(\"rewind\"", (CONTENTS,)),
    Mutant("rewinds-marked-at-the-first-loss", "report/charts.py", "for at, loss in reversed(losses)", "for at, loss in losses", (CONTENTS,)),
    Mutant("rewinds-without-a-key", "report/page.py", "    (\"rewind\", \"went back\"),\n", "", (CONTENTS,)),
    Mutant("watch-silent-about-rewinds", "report/dashboard.py", "if back := sum(", "if back := 0 * sum(", ("tests/report/test_watch.py",)),
    Mutant("rewinds-from-the-step-they-go-to", "data/provenance/rewind.py", "max(reached, step, _last_step(run))", "step", ("tests/integration/test_rewind.py",)),
)  # fmt: skip
