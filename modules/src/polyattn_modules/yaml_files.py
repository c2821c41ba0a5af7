"""Reading a YAML file of settings, strictly."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from polyattn import ConfigError
from polyattn.messages import shortened, shown


def read_yaml(path: str | Path, what: str = "config file") -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        path: the file.
        what: what to call it in messages.

    Raises:
        ConfigError: the file is missing, cannot be read as YAML, does not hold a mapping, or gives a key twice.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Strict)  # noqa: S506 - it is a SafeLoader
    except (OSError, ValueError, OverflowError, yaml.YAMLError) as error:  # the loader lets bad dates and numbers pass
        raise ConfigError(f"{what} {path} cannot be read: {shortened(str(error))}") from error
    except RecursionError as error:
        raise ConfigError(f"{what} {path} cannot be read: it is nested too deeply") from error
    if not isinstance(content, dict):
        got = "nothing" if content is None else type(content).__name__
        raise ConfigError(f"{what} {path} must hold a mapping of settings, got {got}")
    return content


class _Strict(yaml.SafeLoader):
    """YAML's safe loader, which takes the last of two equal keys, made to refuse them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        "while reading a mapping",
                        node.start_mark,
                        f"the key {shown(key_node.value)} is given twice",
                        key_node.start_mark,
                    )
                seen.add(key_node.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping
