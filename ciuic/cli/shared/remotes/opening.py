"""The remote that ``--repo URL`` names, opened for reading.

Guarantees: a machine that never saw the remote needs the URL and the key, and no configuration. Secrets come from the environment, the
configuration or a prompt on the terminal, and never from the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import click

from ciuic.errors import CiuicError, UsageError

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig
    from ciuic.remote.objects.urls import StoreSettings
    from ciuic.remote.reading.opening import ReadableRemote
    from ciuic.remote.sealing.slot_secret import SlotSecret

_RECOVERY_MARK: Final = "ciuic-"
_INSTALL_HINT: Final = "pip install 'ciuic[remote]'"


def open_named_remote(url: str, remotes: Callable[[], Sequence[RemoteConfig]]) -> ReadableRemote:
    """Open the remote with this URL.

    Args:
        url: Place of the remote.
        remotes: Returns what the configuration says of remotes; may raise CiuicError.

    Raises:
        UsageError: the URL is none of a remote, or the packages for remotes are not installed.
        CiuicError: as `open_remote_repository`.
    """
    try:
        # Only here: the other commands do without these packages.
        from ciuic.remote.access.secrets import configured_secrets
        from ciuic.remote.errors import WrongKey
        from ciuic.remote.reading.opening import open_remote_repository
    except ImportError as error:
        raise UsageError(
            f"remotes need a package that is not installed: {error}", hint=_INSTALL_HINT
        ) from None
    config = _configured(url, remotes)
    settings = None if config is None else _settings(config)
    secrets = configured_secrets(config)
    # An attacker who can write to the bucket could otherwise have a host without a key read forged snapshots.
    sealed = config is not None and config.encryption
    try:
        return open_remote_repository(url, settings, secrets, require_sealed=sealed)
    except WrongKey:
        if secrets or not sys.stdin.isatty():
            raise
    secrets = [_asked(url)]
    return open_remote_repository(url, settings, secrets, require_sealed=sealed)


def _configured(url: str, remotes: Callable[[], Sequence[RemoteConfig]]) -> RemoteConfig | None:
    """Return what the configuration says of this remote, if there is one that can be read."""
    from ciuic.remote.objects.urls import parse_url

    place = parse_url(url)
    try:
        known = remotes()
    except CiuicError:
        # A rescue must work where it is missing or broken.
        return None
    return next((remote for remote in known if parse_url(remote.url) == place), None)


def _settings(config: RemoteConfig) -> StoreSettings:
    from ciuic.remote.objects.urls import StoreSettings

    return StoreSettings(endpoint=config.endpoint or "", region=config.region or "")


def _asked(url: str) -> SlotSecret:
    """Ask for a passphrase, or a recovery key as it was printed."""
    from ciuic.remote.sealing.slot_secret import passphrase_secret, recovery_secret

    text: str = click.prompt(f"passphrase or recovery key of {url}", hide_input=True, err=True)
    is_recovery = text.strip().lower().startswith(_RECOVERY_MARK)
    return recovery_secret(text) if is_recovery else passphrase_secret(text)
