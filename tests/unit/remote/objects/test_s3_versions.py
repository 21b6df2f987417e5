"""Versions of a bucket of SeaweedFS: listed in pages of any size, read by ranges, locked."""

from __future__ import annotations

import time

import pytest
from support.object_servers import SeaweedFS, environment_for_s3

from ciuic.errors import NotPermitted, UsageError
from ciuic.remote.objects import s3_botocore
from ciuic.remote.objects.model import NoSuchObject, ObjectVersions, group_versions
from ciuic.remote.objects.opening import open_versions
from ciuic.remote.objects.urls import StoreSettings


def _versions(server: SeaweedFS, url: str) -> ObjectVersions:
    return open_versions(url, StoreSettings(endpoint=server.endpoint), environment_for_s3(server.endpoint))


@pytest.mark.parametrize("page", [1, 3, 1000])
def test_pages_of_any_size_list_the_same(
    seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    """Versions and marks of a name follow each other, newest first, wherever a page ends; ``after`` leaves out names."""
    monkeypatch.setattr(s3_botocore, "_PAGE", page)
    url = seaweedfs.versioned_url()
    objects = seaweedfs.connect(url)
    for name, contents in (("a/1", b"xyz"), ("a/2", b"q"), ("a/3", b"mnop"), ("b/1", b"z")):
        for number in range(len(contents)):
            objects.put(name, [contents[number : number + 1] * (number + 1)])
            if name == "a/1":
                objects.delete([name])
    versions = _versions(seaweedfs, url)
    found = list(group_versions(versions.list("a/")))
    assert [(one.name, one.total) for one in found] == [("a/1", 3), ("a/2", 1), ("a/3", 4)]
    for one, contents in zip(found, (b"xyz", b"q", b"mnop"), strict=True):
        read = [bytes(versions.read(version, 0, 10)) for version in one.versions]
        assert read == [contents[at : at + 1] * (at + 1) for at in range(len(contents))]
        assert (one.current is None) == (one.name == "a/1")
    assert [one.name for one in group_versions(versions.list("", after="a/2"))] == ["a/3", "b/1"]
    assert not list(group_versions(versions.list("c/")))


def test_ranges_of_versions(seaweedfs: SeaweedFS) -> None:
    """A range is cut at the end of the version; a version that is gone is told."""
    url = seaweedfs.versioned_url()
    seaweedfs.connect(url).put("a", [b"0123456789"])
    versions = _versions(seaweedfs, url)
    (found,) = group_versions(versions.list("a"))
    (version,) = found.versions
    assert [bytes(versions.read(version, *part)) for part in ((0, 3), (8, 5), (10, 5), (20, 1), (3, 0))] == [
        b"012",
        b"89",
        b"",
        b"",
        b"",
    ]
    with pytest.raises(NoSuchObject):
        versions.read(version._replace(name="b"), 0, 1)


def test_a_bucket_without_locks(seaweedfs: SeaweedFS) -> None:
    """A bucket without object lock is told as such; a store without versions is refused."""
    url = seaweedfs.versioned_url()
    seaweedfs.connect(url).put("a", [b"1"])
    versions = _versions(seaweedfs, url)
    (found,) = group_versions(versions.list("a"))
    with pytest.raises(NotPermitted, match="no object lock"):
        versions.lock(found.versions[0], time.time_ns())
    for other in ("gs://bucket", "az://container", "file:///nas"):
        with pytest.raises(UsageError, match="cannot be read here"):
            open_versions(other)
