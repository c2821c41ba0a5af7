"""``python -m tiny_lm``: the command line without the installed script."""

from tiny_lm.cli import main

main(prog_name="tiny-lm")
