"""Remotes of the configuration: their objects, and how they are opened."""

from __future__ import annotations

from collections.abc import Sequence

from ciuic.config import RemoteConfig
from ciuic.remote.access.remote import Remote, open_remote
from ciuic.remote.errors import WrongKey
from ciuic.remote.objects.model import Objects
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.objects.urls import StoreSettings
from ciuic.remote.sealing.key_slot import GoesOn
from ciuic.remote.sealing.slot_secret import SlotSecret


def configured_objects(config: RemoteConfig, *, make: bool = False) -> Objects:
    """Return the objects of a configured remote, with a client of their own. No object store is asked yet.

    Args:
        config: The remote's part of the configuration.
        make: Make the directory of a ``file`` URL where it is missing.

    Raises:
        UsageError: the URL or a setting is wrong, or obstore is not installed.
        NoCredentials: the shared files name credentials that cannot be used.
        RemoteUnreachable: a directory is not there.
    """
    settings = StoreSettings(
        endpoint=config.endpoint or "",
        region=config.region or "",
        storage_class=config.storage_class or "",
    )
    return open_objects(config.url, settings, make=make)


def open_configured(
    config: RemoteConfig, objects: Objects, secrets: Sequence[SlotSecret], *, goes_on: GoesOn | None = None
) -> Remote:
    """Open a configured remote as `open_remote` does, and refuse one in clear where encryption is configured.

    Raises:
        WrongKey: no secret fits, or the remote is not encrypted and the configuration does not say so.
    """
    remote = open_remote(objects, secrets, goes_on=goes_on)
    return require_sealed(remote) if config.encryption else remote


def require_sealed(remote: Remote) -> Remote:
    """Return the remote where it is encrypted.

    Raises:
        WrongKey: it is not.
    """
    # An attacker who can write to the bucket could otherwise have everything sent in clear to a host without a key.
    if not remote.stored.sealed:
        raise WrongKey(
            f"the remote at {remote.objects.url} is not encrypted, and the configuration does not say so",
            hint="if it was made so: encryption = false under [remote]",
        )
    return remote
