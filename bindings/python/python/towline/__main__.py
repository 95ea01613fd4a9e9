"""The `towline` command, as the wheel installs it and as `python -m towline` runs it: the same as the binary of that name."""

from __future__ import annotations

import signal
import sys

from . import _towline


def main() -> int:
    """Runs the command that this process was started with; the exit code."""
    # Python's own handler would raise KeyboardInterrupt after the command has ended in good order.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _towline.command(["towline", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
