"""Entry point of the `towline` command of the wheel and of `python -m towline`: the same program as the binary."""

from __future__ import annotations

import signal
import sys

from . import _towline


def main() -> int:
    """Runs the command with the arguments of this process; returns the exit code."""
    # The command handles SIGINT itself; Python's handler would raise KeyboardInterrupt after it has ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _towline.command(["towline", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
