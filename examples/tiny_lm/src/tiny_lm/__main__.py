"""``tiny-lm`` and ``python -m tiny_lm``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C prints no traceback, not even while torch is being imported."""
    try:
        from tiny_lm.cli import commands

        commands(prog_name="tiny-lm")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
