"""The command ``titan``, also as ``python -m titan_core`` for launchers that want a module."""

import contextlib
import gc
import signal
import sys
import threading


def main() -> int:
    """Run the command line. The garbage collector rests while modules are imported, where it finds nothing to collect and
    takes a tenth of the start-up; :func:`titan_core.cli.main.main` wakes it before a command runs."""
    gc.disable()
    try:
        from titan_core.cli.main import main as run

        status = run()
        _leave_at_interrupt()
        return status
    except KeyboardInterrupt:  # while it was imported
        print("titan: interrupted", file=sys.stderr)
        return 130


def _leave_at_interrupt() -> None:
    """All is done: an interrupt from now on ends the process without the traceback of an interpreter on its way out."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    with contextlib.suppress(OSError):  # the interpreter reports what cannot be written
        sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
