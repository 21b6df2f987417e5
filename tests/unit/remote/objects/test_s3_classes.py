"""Storage classes over S3: the requests as they go over the wire, and what the answers mean (botocore's Stubber)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ciuic.errors import UsageError
from ciuic.remote.objects.model import (
    ArchivedObject,
    NoSuchObject,
    NotAListing,
    RemoteRefused,
    RemoteUnreachable,
)
from ciuic.remote.objects.opening import open_classes
from ciuic.remote.objects.s3_botocore import S3Classes
from ciuic.remote.objects.storage_classes import CLASSES, ObjectClass, find_class
from ciuic.remote.objects.urls import StoreSettings, parse_url

stub = pytest.importorskip("botocore.stub")
from ciuic.remote.objects.s3_botocore import S3Client  # noqa: E402

NAME = "packs/data/aa/x"
WHERE = {"Bucket": "bucket", "Key": f"top/{NAME}"}


@pytest.fixture
def stubbed() -> Iterator[tuple[S3Classes, stub.Stubber]]:
    environment = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "HOME": "/nonexistent"}
    client = S3Client(parse_url("s3://bucket/top"), StoreSettings(region="eu-central-1"), environment)
    with stub.Stubber(client.client) as stubber:
        yield S3Classes(client), stubber
        stubber.assert_no_pending_responses()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({}, ObjectClass("", "ready")),
        ({"StorageClass": "GLACIER_IR"}, ObjectClass("GLACIER_IR", "ready")),
        ({"StorageClass": "GLACIER"}, ObjectClass("GLACIER", "archived")),
        ({"StorageClass": "DEEP_ARCHIVE"}, ObjectClass("DEEP_ARCHIVE", "archived")),
        (
            {"StorageClass": "GLACIER", "Restore": 'ongoing-request="true"'},
            ObjectClass("GLACIER", "thawing"),
        ),
        (
            {
                "StorageClass": "GLACIER",
                "Restore": 'ongoing-request="false", expiry-date="Fri, 21 Dec 2012 00:00:00 GMT"',
            },
            ObjectClass("GLACIER", "ready"),
        ),
        (
            {"StorageClass": "GLACIER", "Restore": 'ongoing-request="false", expiry-date="soon"'},
            ObjectClass("GLACIER", "ready"),
        ),
    ],
)
def test_look_reads_class_and_restore_header(
    stubbed: tuple[S3Classes, stub.Stubber], answer: dict[str, str], expected: ObjectClass
) -> None:
    """HEAD's class and x-amz-restore say whether an object can be read or is being thawed; of a date that is no date nothing depends."""
    classes, stubber = stubbed
    stubber.add_response("head_object", answer, WHERE)
    assert classes.look(NAME) == expected


def test_change_copies_the_object_onto_itself(stubbed: tuple[S3Classes, stub.Stubber]) -> None:
    """A move is one CopyObject with the new class, within the store; archived and missing ones are told apart."""
    classes, stubber = stubbed
    wanted = {
        **WHERE,
        "CopySource": WHERE,
        "StorageClass": "GLACIER",
        "MetadataDirective": "REPLACE",
    }
    stubber.add_response("copy_object", {}, wanted)
    classes.change(NAME, "GLACIER")
    stubber.add_client_error("copy_object", "InvalidObjectState", http_status_code=403)
    with pytest.raises(ArchivedObject):
        classes.change(NAME, "DEEP_ARCHIVE")
    stubber.add_client_error("copy_object", "NoSuchKey", http_status_code=404)
    with pytest.raises(NoSuchObject):
        classes.change(NAME, "GLACIER")


def test_thaw_asks_for_days_and_tier_and_may_be_repeated(stubbed: tuple[S3Classes, stub.Stubber]) -> None:
    """RestoreObject has days and tier; an answer that it is under way, or needless, is no error."""
    classes, stubber = stubbed
    wanted = {**WHERE, "RestoreRequest": {"Days": 3, "GlacierJobParameters": {"Tier": "Bulk"}}}
    stubber.add_response("restore_object", {}, wanted)
    classes.thaw(NAME, "bulk", 3)
    for code, status in (("RestoreAlreadyInProgress", 409), ("InvalidObjectState", 403)):
        stubber.add_client_error("restore_object", code, http_status_code=status)
        classes.thaw(NAME, "bulk", 3)
    for code, status, error in (
        ("NoSuchKey", 404, NoSuchObject),
        ("AccessDenied", 403, RemoteRefused),
        ("GlacierExpeditedRetrievalNotAvailable", 503, RemoteUnreachable),
    ):
        stubber.add_client_error("restore_object", code, http_status_code=status)
        with pytest.raises(error):
            classes.thaw(NAME, "bulk", 3)


def test_list_reads_every_page(stubbed: tuple[S3Classes, stub.Stubber]) -> None:
    """A listing goes on at the store's token, and names are relative to the remote."""
    classes, stubber = stubbed
    first = {"Bucket": "bucket", "Prefix": "top/packs/data/"}
    stubber.add_response(
        "list_objects_v2",
        {
            "Contents": [{"Key": "top/packs/data/a", "StorageClass": "STANDARD"}],
            "IsTruncated": True,
            "NextContinuationToken": "t",
        },
        first,
    )
    page = {"Contents": [{"Key": "top/packs/data/b", "StorageClass": "GLACIER"}], "IsTruncated": False}
    stubber.add_response("list_objects_v2", page, {**first, "ContinuationToken": "t"})
    assert [found[:2] for found in classes.list("packs/data/")] == [
        ("packs/data/a", ""),
        ("packs/data/b", "GLACIER"),
    ]


def test_classes_are_ordered_and_unknown_ones_refused() -> None:
    """The default class of each store is its warmest; only archives have hours; a name that no store has is refused."""
    for scheme, known in CLASSES.items():
        assert min(known.values(), key=lambda one: one.coldness).coldness == 0
        assert find_class(scheme, "").coldness == 0
        for name in known:
            assert find_class(scheme, name.lower()) == known[name]
    with pytest.raises(UsageError, match="COLDLINE") as refused:
        find_class("s3", "COLDLINE")
    assert "GLACIER_IR" in (refused.value.hint or "")
    for url in ("gs://bucket/x", "oss://bucket/x", "file:///mnt/x"):
        with pytest.raises(UsageError):
            open_classes(url)


def test_a_page_that_names_itself_as_the_next_one_is_refused(
    stubbed: tuple[S3Classes, stub.Stubber],
) -> None:
    """A listing whose continuation token comes back with the page that it asked for ends with an error."""
    classes, stubber = stubbed
    page = {"IsTruncated": True, "NextContinuationToken": "t", "Contents": []}
    stubber.add_response("list_objects_v2", page)
    stubber.add_response("list_objects_v2", page)
    with pytest.raises(NotAListing, match="names itself"):
        list(classes.list("packs/"))
