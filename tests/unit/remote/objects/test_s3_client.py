"""Client of botocore: the place and the credentials of obstore's, errors of the remote, and versions of a bucket of SeaweedFS."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from support.object_servers import SeaweedFS, environment_for_s3

from ciuic.errors import NotPermitted, UsageError
from ciuic.remote.objects import s3_botocore
from ciuic.remote.objects.credentials import NoCredentials
from ciuic.remote.objects.model import (
    NoSuchBucket,
    NoSuchObject,
    ObjectVersions,
    RemoteRefused,
    RemoteUnreachable,
    group_versions,
)
from ciuic.remote.objects.opening import open_versions
from ciuic.remote.objects.s3_botocore import S3Client
from ciuic.remote.objects.urls import StoreSettings, parse_url

KEYS = {"AWS_ACCESS_KEY_ID": "AKx", "AWS_SECRET_ACCESS_KEY": "sEcReT", "HOME": "/nonexistent"}


def _client(url: str, environment: dict[str, str], **settings: str) -> S3Client:
    return S3Client(parse_url(url), StoreSettings(**settings), environment)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "settings", "environment", "endpoint", "style"),
    [
        ("s3://bucket/a/b", {}, {}, "https://s3.us-east-1.amazonaws.com", "virtual"),
        ("s3://bucket", {"region": "eu-west-3"}, {}, "https://s3.eu-west-3.amazonaws.com", "virtual"),
        ("s3://bucket", {}, {"AWS_ENDPOINT_URL": "http://h:9000"}, "http://h:9000", "path"),
        ("s3://bucket", {"endpoint": "https://h:9"}, {"AWS_ENDPOINT_URL": "http://x"}, "https://h:9", "path"),
        ("oss://bucket", {"region": "cn-hangzhou"}, {}, "https://s3.oss-cn-hangzhou.aliyuncs.com", "virtual"),
        (
            "oss://bucket",
            {"endpoint": "https://bucket.s3.oss-cn-x.aliyuncs.com"},
            {},
            "https://s3.oss-cn-x.aliyuncs.com",
            "virtual",
        ),
    ],
)
def test_the_client_reaches_the_place_of_the_objects(
    url: str, settings: dict[str, str], environment: dict[str, str], endpoint: str, style: str
) -> None:
    """Region, endpoint and the form of addresses are those with which obstore's clients are made."""
    oss = {"OSS_ACCESS_KEY_ID": "AKx", "OSS_ACCESS_KEY_SECRET": "sEcReT"}
    made = _client(url, {**KEYS, **oss, **environment}, **settings)
    assert made.client.meta.endpoint_url == endpoint
    assert made.client.meta.config.s3["addressing_style"] == style
    assert made.client._get_credentials().access_key == "AKx"
    assert made.key("w/1") == ("a/b/w/1" if "a/b" in url else "w/1")
    assert made.name(made.key("w/1")) == "w/1"


def test_credentials_of_shared_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile of the given environment counts, not that of the process, and a rotated key is taken."""
    monkeypatch.setenv("AWS_PROFILE", "of-this-process")
    (tmp_path / ".aws").mkdir()
    file = tmp_path / ".aws/credentials"
    file.write_text("[team]\naws_access_key_id = AK2\naws_secret_access_key = s\naws_session_token = t\n")
    made = _client("s3://bucket", {"HOME": str(tmp_path), "AWS_PROFILE": "team"})
    assert made.client._get_credentials().get_frozen_credentials()[:3] == ("AK2", "s", "t")
    with pytest.raises(NoCredentials, match="no profile"):
        _client("s3://bucket", {"HOME": str(tmp_path), "AWS_PROFILE": "other"})


def test_without_botocore(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library is told with the command that installs it; stores without this interface are refused."""
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(UsageError, match="botocore") as told:
        _client("s3://bucket", KEYS)
    assert "remote-versions" in (told.value.hint or "")
    with pytest.raises(UsageError, match="no interface of S3"):
        _client("gs://bucket", KEYS)


def test_errors_are_those_of_objects(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing object, a missing bucket, wrong keys and a server that is away are told as for other requests."""
    monkeypatch.setattr(s3_botocore, "_MAX_ATTEMPTS", 1)
    environment = environment_for_s3(seaweedfs.endpoint)
    made = _client(seaweedfs.new_url(), environment)
    with made.request("store", "x", writes=True) as s3:
        s3.put_object(Bucket=made.bucket, Key=made.key("x"), Body=b"abc")
    assert seaweedfs.connect(str(made.url)).get("x") == b"abc"
    with pytest.raises(NoSuchObject), made.request("read", "y") as s3:
        s3.get_object(Bucket=made.bucket, Key=made.key("y"))
    with pytest.raises(NoSuchBucket), made.request("read", "y") as s3:
        s3.get_object(Bucket="no-such-bucket-here", Key="y")
    wrong = _client(str(made.url), {**environment, "AWS_SECRET_ACCESS_KEY": "sEcReT"})
    with pytest.raises(NotPermitted) as refused, wrong.request("read", "x") as s3:
        s3.get_object(Bucket=made.bucket, Key=made.key("x"))
    assert isinstance(refused.value, RemoteRefused)
    assert "sEcReT" not in str(refused.value)
    away = _client(str(made.url), environment, endpoint="http://127.0.0.1:1")
    with pytest.raises(RemoteUnreachable), away.request("read", "x") as s3:
        s3.get_object(Bucket=made.bucket, Key=made.key("x"))


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
