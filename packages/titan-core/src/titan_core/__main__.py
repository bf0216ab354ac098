"""The command ``titan``, also as ``python -m titan_core`` for launchers that want a module."""

import gc
import sys


def main() -> int:
    """Run the command line. The garbage collector rests while modules are imported, where it finds nothing to collect and
    takes a tenth of the start-up; :func:`titan_core.cli.main.main` wakes it before a command runs."""
    gc.disable()
    try:
        from titan_core.cli.main import main as run

        return run()
    except KeyboardInterrupt:  # while it was imported
        print("titan: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
