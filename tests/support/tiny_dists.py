"""Tiny distributions for tests: a folder of metadata and modules, or a wheel that pip installs."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Mapping
from pathlib import Path

#: A backend module without torch: everything the registry checks and nothing else.
BACKEND = """
class Backend:
    name = {name!r}
    api_version = 1

    def unsupported(self, layout, request):
        return ()

    def prepare(self, layout, request):
        raise NotImplementedError

    def attend(self, q, k, v, prepared, *, bias=None, sinks=None):
        raise NotImplementedError
"""


def backend_source(name, before="", after=""):
    """The text of a module with a class ``Backend`` called ``name``, with code before and after it."""
    return f"{before}\n{BACKEND.format(name=name)}\n{after}\n"


@dataclasses.dataclass(frozen=True)
class TinyDist:
    """A distribution to write to disk.

    Attributes:
        name: distribution's name.
        version: its version.
        backends: name -> value of the group ``polyattn.backends``.
        rope: the same for ``polyattn.rope``.
        hooks: the same for ``polyattn.hooks``.
        modules: file name -> source.
        entry_points: the text of ``entry_points.txt``, instead of the three groups.
    """

    name: str
    version: str = "1.0"
    backends: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rope: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hooks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    entry_points: str | None = None

    @property
    def stem(self):
        return f"{self.name.replace('-', '_')}-{self.version}"

    def files(self, info=None):
        """Path below a ``site-packages`` -> text; ``info`` is the metadata folder, ``<stem>.dist-info`` by default."""
        info = info or f"{self.stem}.dist-info"
        groups = {"polyattn.backends": self.backends, "polyattn.rope": self.rope, "polyattn.hooks": self.hooks}
        lines = [
            line
            for group, entries in groups.items()
            if entries
            for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), "")
        ]
        header = f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.version}\nSummary: The tiny {self.name}\n"
        return {
            **self.modules,
            f"{info}/{'PKG-INFO' if info.endswith('.egg-info') else 'METADATA'}": header,
            f"{info}/entry_points.txt": "\n".join(lines) if self.entry_points is None else self.entry_points,
        }

    def unpack(self, folder, info=None):
        """Write the files into ``folder``, as an installer would; returns ``folder``."""
        for path, text in self.files(info).items():
            target = Path(folder, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        return Path(folder)

    def wheel(self, folder):
        """Write a wheel into ``folder``; returns its path."""
        path = Path(folder, f"{self.stem}-py3-none-any.whl")
        info = f"{self.stem}.dist-info"
        files = self.files() | {f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
        record = f"{info}/RECORD"
        files[record] = "".join(f"{name},,\n" for name in [*files, record])
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return path


def tiny_backend(dist, name, *, version="1.0", module=None, before="", after=""):
    """A distribution with one working backend."""
    module = module or dist.replace("-", "_")
    return TinyDist(
        dist,
        version,
        backends={name: f"{module}:Backend"},
        modules={f"{module}.py": backend_source(name, before, after)},
    )
