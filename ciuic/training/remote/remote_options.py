"""Options of `SnapshotManager` that name remotes, as the configuration of remotes has them.

Guarantees: a mistake raises one sentence that names it, and nothing has been contacted. The name of a remote
follows from its URL and endpoint: what was recorded of one place is never taken for another.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from ciuic.config import RemoteConfig, load_config
from ciuic.config.keys import REMOTE_KEYS
from ciuic.config.load import remote_with
from ciuic.errors import CiuicError, UsageError, pip_install
from ciuic.remote.access import configured_settings
from ciuic.remote.objects.urls import parse_url
from ciuic.retention import RetentionPolicy

_KEYS: Final = (
    "url",
    "endpoint",
    "region",
    "ssh_command",
    "ssh_program",
    "bandwidth",
    "encryption",
    "key_file",
    "key_command",
    "storage_class",
    "schedule.interval",
    *(name for name in REMOTE_KEYS if name.startswith("keep.")),
)
"""Keys of a mapping, as in ``[remote]`` (docs/configuration.md); a dot stands for a mapping in it."""
# Names of remotes have 32 characters at most: 8 for the digest, one for the hyphen before it.
_MAX_LABEL_CHARACTERS: Final = 20
_DIGEST_DIGITS: Final = 8
_PACKAGES: Final = ("obstore", "cryptography", "blake3")
_STATE_VARIABLE: Final = "XDG_STATE_HOME"


def remotes_from(value: Any) -> tuple[RemoteConfig, ...]:
    """Return the remotes that the option ``remote`` names.

    Args:
        value: A URL, a mapping with the keys of ``[remote]``, a `RemoteConfig`, several of these, None, or True for the
            remotes that the configuration of this machine names.

    Raises:
        UsageError: A URL or a setting is wrong, a remote is named twice, or the packages are not installed.
        TypeError: ``value`` is none of these.
    """
    if value is None or value is False:
        return ()
    if value is True:
        value = _configured_remotes()
    several = [value] if isinstance(value, (str, Mapping, RemoteConfig)) else value
    if not isinstance(several, Iterable):
        raise TypeError(f"remote must be a URL, a mapping with a URL, or several of these, got {value!r}")
    remotes = tuple(_remote_of(one) for one in several)
    if len({one.name for one in remotes}) < len(remotes):
        raise UsageError(f"each remote must be named once, got {', '.join(one.url for one in remotes)}")
    if remotes:
        _check_packages()
    return remotes


def _configured_remotes() -> tuple[RemoteConfig, ...]:
    """Return the remotes of this machine's configuration (CIUIC_CONFIG, or /etc/ciuic/ciuic.toml).

    Raises:
        UsageError: It names none.
        CiuicError: It cannot be read.
    """
    remotes = load_config().remotes
    if not remotes:
        raise UsageError(
            "remote=True means the remotes in the configuration of this machine, which names none",
            hint="ciuic remote init URL, ciuic remote join URL, or remote=URL",
        )
    return remotes


def local_directory(url: str, environ: Mapping[str, str] | None = None) -> Path:
    """Return the local directory of a training whose ``save_dir`` is a URL.

    It is ``$XDG_STATE_HOME/ciuic/trainings/NAME``, with a NAME from the URL; XDG_STATE_HOME is ``~/.local/state``
    unless it is set.
    """
    variables = os.environ if environ is None else environ
    state = variables.get(_STATE_VARIABLE, "")
    # A relative path is to be ignored (XDG Base Directory Specification).
    home = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return home / "ciuic" / "trainings" / _name_of(url, "")


def _remote_of(value: Any) -> RemoteConfig:
    if isinstance(value, RemoteConfig):
        found = value
    elif isinstance(value, (str, Mapping)):
        found = _parsed({"url": value} if isinstance(value, str) else value)
    else:
        raise TypeError(f"a remote must be a URL or a mapping with a URL, got {value!r}")
    url = str(parse_url(found.url))
    # Checks what it is given, without contacting anything.
    configured_settings(found)
    return replace(found, url=url, name=_name_of(url, found.endpoint or ""))


def _parsed(given: Mapping[str, Any]) -> RemoteConfig:
    values: dict[str, Any] = {}
    for name, value in given.items():
        inner = value.items() if isinstance(value, Mapping) else ((None, value),)
        values |= {name if key is None else f"{name}.{key}": one for key, one in inner}
    unknown = [name for name in values if name not in _KEYS]
    if unknown:
        raise UsageError(f"a remote has no key {unknown[0]!r}; there are {', '.join(_KEYS)}")
    if not values.get("url"):
        raise UsageError('a remote must have a URL: {"url": "s3://BUCKET/PREFIX", …}')
    parsed = {}
    for name, value in values.items():
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        try:
            # The URL is parsed by the store, which knows more schemes in tests.
            parsed[name] = text if name == "url" else REMOTE_KEYS[name].parse(text)
        except ValueError as error:
            raise UsageError(f"{name} of a remote {error}") from None
    # With the defaults of `[remote]`, also those of its retention.
    return remote_with(parsed, RetentionPolicy())


def _name_of(url: str, endpoint: str) -> str:
    where = parse_url(url)
    last = where.prefix.rsplit("/", 1)[-1] or where.bucket
    label = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:_MAX_LABEL_CHARACTERS].strip("-")
    digest = hashlib.sha256(f"{where}\n{endpoint}".encode()).hexdigest()[:_DIGEST_DIGITS]
    return f"{label}-{digest}" if label else digest


def _check_packages() -> None:
    # Found and not imported: together they take a tenth of a second, which only the uploader needs to spend.
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise CiuicError(f"a remote needs {', '.join(missing)}, not installed here", hint=pip_install())
