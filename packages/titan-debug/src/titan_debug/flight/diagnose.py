"""What dumps say of ranks that lost another, in a line. Free of torch."""

from __future__ import annotations

from titan_core.api.errors import UserError
from titan_debug.flight.analysis import MOST_ANALYSED, analyse
from titan_debug.flight.read import dump_folder, read_dumps


def diagnose(run: str, since: float) -> str | None:
    """The verdict over the dumps of the attempt that began ``since``, and the command that says more; ``None`` without
    dumps."""
    command = f"see `titan flight analyse {run}`"
    try:
        dumps = read_dumps(dump_folder(run))
    except UserError:  # there are none
        return None
    if dumps.dumps[0].attempt < since:
        return None
    return command if dumps.world_size > MOST_ANALYSED else f"{analyse(dumps).verdict}; {command}"
