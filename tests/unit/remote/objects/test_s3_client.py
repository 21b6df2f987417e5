"""Client of botocore: the place and the credentials of obstore's, and errors of the remote."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.object_servers import SeaweedFS, environment_for_s3

from ciuic.errors import NotPermitted, UsageError
from ciuic.remote.objects import s3_botocore
from ciuic.remote.objects.credentials import NoCredentials
from ciuic.remote.objects.model import NoSuchBucket, NoSuchObject, RemoteRefused, RemoteUnreachable
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
