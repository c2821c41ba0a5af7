"""``python -m polyattn`` is the command ``polyattn``."""

from polyattn._cli import main

main()
