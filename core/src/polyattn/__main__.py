"""``python -m polyattn`` is the command ``polyattn``, which the distribution polyattn-cli brings."""

from polyattn._wings import installed

installed("polyattn_cli", "the command line").main()
