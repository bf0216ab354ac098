"""Which exit statuses are worth another try (see docs/failures.md): all but the final ones, a limited number of times."""

from __future__ import annotations

import signal

from titan_core.toolkit.errors import EXIT_DATA_ENDED, EXIT_INTERRUPTED, EXIT_NUMERICS, EXIT_PREEMPTED, EXIT_USER_ERROR

PREEMPTED = (EXIT_PREEMPTED, 128 + signal.SIGTERM)
"""The job had to stop, and saved a checkpoint first if it had begun to train: always worth another try."""
FINAL = (EXIT_USER_ERROR, EXIT_NUMERICS, EXIT_DATA_ENDED, EXIT_INTERRUPTED)
"""Another try would end alike, or is not wanted."""
