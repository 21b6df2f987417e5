"""Access tiers of Azure: what its library's answers mean."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from ciuic.remote.objects.azure_classes import AzureClasses
from ciuic.remote.objects.credentials import NoCredentials
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject, RemoteRefused, RemoteUnreachable
from ciuic.remote.objects.storage_classes import ListedClass, ObjectClass
from ciuic.remote.objects.urls import StoreSettings, parse_url

NOW = datetime.now(timezone.utc)
CONNECTION = "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=a2V5;BlobEndpoint=http://127.0.0.1:1/a"


@pytest.fixture(autouse=True)
def library() -> None:
    pytest.importorskip("azure.storage.blob")


class Container:
    """Client of a container with one blob."""

    def __init__(self, **blob: Any) -> None:
        facts = {"name": "p/packs/x", "blob_tier": None, "blob_tier_inferred": None}
        self.blob = SimpleNamespace(
            **{**facts, "blob_tier_change_time": None, "archive_status": None, **blob}
        )
        self.asked: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def list_blobs(self, name_starts_with: str) -> list[Any]:
        assert name_starts_with == "p/packs/"
        return [self.blob]

    def get_blob_client(self, name: str) -> Container:
        assert name == "p/packs/x"
        return self

    def get_blob_properties(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.blob

    def set_standard_blob_tier(self, *arguments: Any, **options: Any) -> None:
        self.asked.append((*arguments, *options.values()))


def classes(**blob: Any) -> tuple[AzureClasses, Container]:
    made = AzureClasses(
        parse_url("az://box/p"), StoreSettings(), {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION}
    )
    container = Container(**blob)
    made._container = container
    return made, container


@pytest.mark.parametrize(
    ("blob", "listed", "looked"),
    [
        ({"blob_tier": "Hot", "blob_tier_inferred": True}, ("", False), ObjectClass("", "ready")),
        ({"blob_tier": "Hot", "blob_tier_change_time": NOW}, ("", True), ObjectClass("", "ready")),
        (
            {"blob_tier": "Hot", "blob_tier_change_time": NOW - timedelta(days=31)},
            ("", False),
            ObjectClass("", "ready"),
        ),
        (
            {"blob_tier": "Cool", "blob_tier_change_time": NOW},
            ("COOL", False),
            ObjectClass("COOL", "ready"),
        ),
        ({"blob_tier": "Archive"}, ("ARCHIVE", False), ObjectClass("ARCHIVE", "archived")),
        (
            {"blob_tier": "Archive", "archive_status": "rehydrate-pending-to-hot"},
            ("ARCHIVE", False),
            ObjectClass("ARCHIVE", "thawing"),
        ),
    ],
)
def test_tiers_and_states(blob: dict[str, Any], listed: tuple[str, bool], looked: ObjectClass) -> None:
    """A tier says whether a blob can be read; one that was set to Hot lately was thawed, and one never set was not."""
    made, _ = classes(**blob)
    assert list(made.list("packs/")) == [ListedClass("packs/x", *listed)]
    assert made.look("packs/x") == looked


def test_moves_and_thaws_set_the_tier() -> None:
    """A move sets the tier; a thaw asks for Hot with the priority of its speed, and only for what is archived."""
    made, container = classes(blob_tier="Archive")
    made.change("packs/x", "COOL")
    made.thaw("packs/x", "standard", 3)
    made.thaw("packs/x", "expedited", 3)
    assert container.asked == [("Cool",), ("Hot", "Standard"), ("Hot", "High")]
    container.blob.archive_status = "rehydrate-pending-to-hot"
    made.thaw("packs/x", "standard", 3)
    assert len(container.asked) == 3


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (409, "BlobArchived", ArchivedObject),
        (404, "BlobNotFound", NoSuchObject),
        (403, "AuthorizationFailure", RemoteRefused),
        (503, "ServerBusy", RemoteUnreachable),
        (0, "", RemoteUnreachable),
    ],
)
def test_errors_are_those_of_objects(status: int, code: str, error: type[Exception]) -> None:
    """What the library raises becomes an error of the remote, without the library's text, which may repeat a signed URL."""
    made, container = classes()
    container.error = RuntimeError("https://a?sig=secret")
    container.error.status_code, container.error.error_code = status, code  # type: ignore[attr-defined]
    with pytest.raises(error) as raised:
        made.look("packs/x")
    assert "secret" not in str(raised.value)


def test_credentials_are_named() -> None:
    """Without credentials the message says which variables are looked at."""
    with pytest.raises(NoCredentials, match="AZURE_STORAGE_CONNECTION_STRING"):
        AzureClasses(parse_url("az://box/p"), StoreSettings(), {})
