"""What an application that PyInstaller freezes needs of polyattn and cannot be found by following imports.

That is the modules behind the lazy names and the commands, the metadata in which plugins are found by name, and every
plugin that is installed and allowed: ``POLYATTN_ALLOW`` and ``POLYATTN_DISABLE`` hold here too.
"""  # noqa: N999 - PyInstaller names it so

from __future__ import annotations

from PyInstaller.utils.hooks import collect_data_files, copy_metadata  # type: ignore[import-untyped]

from polyattn import _MODULES, _cli, _discovery
from polyattn._trust import trust

datas = [*copy_metadata("polyattn"), *collect_data_files("polyattn", excludes=["_cli/template"])]
hiddenimports = [f"polyattn.{module}" for module in _MODULES]
hiddenimports += [command.partition(":")[0] for command, _ in _cli.COMMANDS.values()]
excludedimports = ["copier", "pytest"]
for plugins in _discovery.current().candidates.values():
    for plugin in plugins:
        if not plugin.fault and not trust.forbids(plugin):
            datas += copy_metadata(plugin.dist)
            hiddenimports.append(plugin.module)
