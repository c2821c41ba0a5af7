"""What an application that PyInstaller freezes needs of polyattn and cannot be found by following imports.

That is the modules behind the lazy names and the commands, the metadata in which plugins are found by name, and every
plugin that is installed and allowed: ``POLYATTN_ALLOW`` and ``POLYATTN_DISABLE`` hold here too.
"""  # noqa: N999 - PyInstaller names it so

from __future__ import annotations

import importlib.util

from PyInstaller.utils.hooks import collect_submodules, copy_metadata  # type: ignore[import-untyped]

from polyattn import _MODULES
from polyattn.registry import discovery, trust

_wings = ("polyattn_modules", "polyattn_conformance", "polyattn_cli")
datas = copy_metadata("polyattn")
hiddenimports = [module for module in _MODULES if module.partition(".")[0] == "polyattn"]
for wing in _wings:
    if importlib.util.find_spec(wing):
        datas += copy_metadata(wing)
        hiddenimports += collect_submodules(wing)
excludedimports = ["copier", "pytest"]
for plugins in discovery.current().candidates.values():
    for plugin in plugins:
        if not plugin.fault and not trust.forbids(plugin):
            datas += copy_metadata(plugin.dist)
            hiddenimports.append(plugin.module)
