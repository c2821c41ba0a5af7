"""``python -m smollm2`` and the command ``smollm2``."""

from smollm2.cli import commands


def main() -> None:
    """Run the command line."""
    commands(prog_name="smollm2")


if __name__ == "__main__":
    main()
