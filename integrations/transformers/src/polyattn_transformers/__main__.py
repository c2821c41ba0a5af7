"""Any trainer on transformers, unchanged: ``python -m polyattn_transformers -m trl.scripts.sft --config run.yaml``.

The names of the backends are registered first, so that ``attn_implementation: polyattn_sdpa`` works in the
configuration of whatever runs afterwards.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path

from polyattn import ConfigError
from polyattn_transformers import register

USAGE = """\
Usage: python -m polyattn_transformers [--allow-untested] -m MODULE [ARGUMENTS]
       python -m polyattn_transformers [--allow-untested] SCRIPT.py [ARGUMENTS]

Register every installed backend with transformers, then run the module or the
script as Python does, so that attn_implementation may name one of them in any
configuration, for instance attn_implementation: polyattn_sdpa.

It goes behind a launcher as well:
  torchrun --nproc-per-node 2 -m polyattn_transformers -m MODULE ...
  accelerate launch -m polyattn_transformers -m MODULE ...

--allow-untested accepts a transformers newer than polyattn was tested with.
"""


def main(arguments: list[str]) -> None:
    """Register the backends and run the module or script that ``arguments`` name.

    Raises:
        SystemExit: with the usage and status 0 for ``--help``; with one message and status 2 where nothing can be run.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")  # noqa: T201 - a command
        return
    allow_untested = arguments[:1] == ["--allow-untested"]
    module, target, rest = _target(arguments[1:] if allow_untested else arguments)
    try:
        names = register(allow_untested=allow_untested)
    except ConfigError as error:
        _refuse(str(error))
    if os.environ.get("RANK", "0") == "0":
        print(f"polyattn: registered {', '.join(names)}; running {target}", file=sys.stderr, flush=True)  # noqa: T201
    sys.argv = [target, *rest]
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)  # as Python does for a script
        runpy.run_path(target, run_name="__main__")


def _target(arguments: list[str]) -> tuple[bool, str, list[str]]:
    """Whether it is a module, its name or the path of the script, and its arguments."""
    if not arguments:
        _refuse("give -m MODULE or a script to run, got nothing")
    if arguments[0] != "-m":
        if arguments[0].startswith("-"):
            _refuse(f"give -m MODULE or a script to run, got {arguments[0]}; options of a script stand behind it")
        if not Path(arguments[0]).is_file():
            _refuse(f"the script must be a file, got {arguments[0]}, which is not there; give a module as -m NAME")
        return False, arguments[0], arguments[1:]
    if len(arguments) == 1:
        _refuse("-m must be followed by the name of a module, got nothing")
    name = arguments[1]
    if not _is_there(name):
        _refuse(f"the module must be installed or lie in the working directory, got {name}, which is not found")
    return True, name, arguments[2:]


def _is_there(name: str) -> bool:
    """Whether Python finds a module; what its packages raise when they are imported is their own error."""
    if not name or name.startswith("."):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return False


def _refuse(text: str) -> None:
    print(f"polyattn_transformers: {text}", file=sys.stderr)  # noqa: T201
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
