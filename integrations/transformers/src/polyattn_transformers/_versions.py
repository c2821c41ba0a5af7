"""Which transformers this package was tested with."""

from __future__ import annotations

from polyattn import ConfigError

#: First and last minor version whose mask factories and attention calls the tests were run against.
OLDEST, NEWEST = (5, 12), (5, 19)


def check_version(version: str, *, allow_untested: bool = False) -> None:
    """Refuse a transformers that the tests did not run against.

    Args:
        version: ``transformers.__version__``.
        allow_untested: accept a newer one.

    Raises:
        ConfigError: the version is older, or newer and not allowed.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    tested = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if (major, minor) < OLDEST:
        raise ConfigError(
            f"transformers must be one of {tested}, got {version}, whose masks polyattn cannot read; "
            f"pip install 'transformers>={OLDEST[0]}.{OLDEST[1]}'"
        )
    if (major, minor) > NEWEST and not allow_untested:
        raise ConfigError(
            f"transformers must be one of {tested}, got {version}, which polyattn-transformers was not tested with; "
            f"pip install 'transformers<{NEWEST[0]}.{NEWEST[1] + 1}', a newer polyattn-transformers, or "
            "register(allow_untested=True)"
        )
