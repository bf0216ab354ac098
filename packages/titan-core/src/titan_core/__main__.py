"""The ``titan`` command, also ``python -m titan_core`` for launchers that start a module."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()]):
    del sys.path[0]  # `python -m` looks in the current folder first, and would import a random.py there

import gc
import signal
import threading


def main() -> int:
    """Run the command line.

    Imports run without the garbage collector, which would find nothing and take a tenth of the start-up time;
    :func:`titan_core.cli.main.main` enables it before a command runs.
    """
    gc.disable()
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # for the Python processes that this one starts, and theirs
    try:
        from titan_core.cli.main import main as run

        status = run()
        if "titan_core.loop.world" in sys.modules:  # and there may have been a job
            from titan_core.loop.gc_settings import free_job

            free_job()
        _leave_at_interrupt()
        return status
    except KeyboardInterrupt:  # during the import
        print("titan: interrupted", file=sys.stderr)
        return 130


def _leave_at_interrupt() -> None:
    """Let an interrupt end the process at once. The command is done, and Python would print a traceback while it exits."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
