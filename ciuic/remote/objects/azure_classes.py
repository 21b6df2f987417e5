"""Access tiers of Azure Blob Storage: by its own library, because obstore has no request for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any, Final

from ciuic.errors import CiuicError, UsageError, pip_install
from ciuic.remote.objects.credentials import NoCredentials
from ciuic.remote.objects.model import (
    ArchivedObject,
    NoSuchObject,
    RemoteRefused,
    RemoteUnreachable,
    check_name,
)
from ciuic.remote.objects.storage_classes import ListedClass, ObjectClass, ThawSpeed
from ciuic.remote.objects.urls import RemoteUrl, StoreSettings

_DEFAULT_TIER: Final = "HOT"
# What was thawed stays where it is so long: rules would archive it again before it was read.
_THAWED_FOR: Final = timedelta(days=30)
_PASSING: Final = frozenset({408, 429})


class AzureClasses:
    """`ObjectClasses` of a container. What is thawed moves to the tier ``Hot``.

    References:
        Azure Blob Storage REST API: Set Blob Tier, Get Blob Properties (x-ms-access-tier, x-ms-archive-status)
    """

    scheme: Final = "az"

    def __init__(
        self, url: RemoteUrl, settings: StoreSettings, environment: Mapping[str, str] = os.environ
    ) -> None:
        """Make the client; the store is not asked yet.

        Raises:
            UsageError: azure-storage-blob is not installed.
            NoCredentials: the environment has none that this takes.
        """
        self._prefix = f"{url.prefix}/" if url.prefix else ""
        self._container = _container(url, settings, environment)

    def list(self, prefix: str) -> Iterator[ListedClass]:
        """Yield name and tier of the objects whose names begin with ``prefix``."""
        with _request("list", prefix):
            for blob in self._container.list_blobs(name_starts_with=self._prefix + prefix):
                tier = _tier(blob.blob_tier)
                is_set = not tier and not blob.blob_tier_inferred
                thawed = is_set and _is_recent(blob.blob_tier_change_time)
                yield ListedClass(blob.name[len(self._prefix) :], tier, thawed)

    def look(self, name: str) -> ObjectClass:
        """Return the tier of an object, and whether it can be read."""
        check_name(name)
        with _request("look at", name):
            found = self._container.get_blob_client(self._prefix + name).get_blob_properties()
        tier = _tier(found.blob_tier)
        if found.archive_status:
            return ObjectClass(tier, "thawing")
        return ObjectClass(tier, "archived" if tier == "ARCHIVE" else "ready")

    def change(self, name: str, storage_class: str) -> None:
        """Set the tier of an object."""
        check_name(name)
        with _request("move", name):
            self._container.get_blob_client(self._prefix + name).set_standard_blob_tier(
                storage_class.capitalize()
            )

    def thaw(self, name: str, speed: ThawSpeed, days: int) -> None:
        """Ask for an archived object; Azure puts it into the tier ``Hot``, where rules leave it for 30 days."""
        check_name(name)
        if self.look(name).state != "archived":
            return
        with _request("thaw", name):
            self._container.get_blob_client(self._prefix + name).set_standard_blob_tier(
                "Hot", rehydrate_priority="High" if speed == "expedited" else "Standard"
            )


def _is_recent(changed: datetime | None) -> bool:
    """Return whether the tier was set within the last days; None for one that was never set."""
    return changed is not None and datetime.now(timezone.utc) - changed < _THAWED_FOR


def _tier(name: object) -> str:
    text = str(getattr(name, "value", name) or "").upper()
    return "" if text == _DEFAULT_TIER else text


def _container(url: RemoteUrl, settings: StoreSettings, environment: Mapping[str, str]) -> Any:
    try:
        from azure.storage.blob import BlobServiceClient
    except ImportError:
        raise UsageError(
            "access tiers of Azure need azure-storage-blob", hint=pip_install("ciuic[remote-versions]")
        ) from None
    text = environment.get("AZURE_STORAGE_CONNECTION_STRING", "")
    if text:
        return BlobServiceClient.from_connection_string(text).get_container_client(url.bucket)
    account = settings.account or environment.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    secret = environment.get("AZURE_STORAGE_ACCOUNT_KEY") or environment.get("AZURE_STORAGE_SAS_TOKEN")
    if not account or not secret:
        raise NoCredentials(
            "no credentials for Azure's tiers: set AZURE_STORAGE_CONNECTION_STRING, or "
            "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN"
        )
    endpoint = settings.endpoint or f"https://{account}.blob.core.windows.net"
    return BlobServiceClient(endpoint, credential=secret).get_container_client(url.bucket)


@contextmanager
def _request(doing: str, name: str) -> Iterator[None]:
    """Turn the library's errors into those of `Objects`; their texts may repeat signed URLs, and are not shown."""
    try:
        yield
    except CiuicError:
        raise
    except Exception as error:
        status = int(getattr(error, "status_code", 0) or 0)
        code = str(getattr(getattr(error, "error_code", ""), "value", getattr(error, "error_code", "")) or "")
        if code in ("BlobArchived", "BlobBeingRehydrated"):
            raise ArchivedObject(name) from None
        if status == 404:
            raise NoSuchObject(name) from None
        answer = f"cannot {doing} {name}: the store answered {' '.join(filter(None, (str(status or ''), code))) or 'nothing'}"
        if 400 <= status < 500 and status not in _PASSING:
            raise RemoteRefused(answer) from None
        raise RemoteUnreachable(answer) from None
