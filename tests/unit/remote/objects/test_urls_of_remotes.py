"""URLs of remotes, their settings, and what becomes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import UsageError
from ciuic.remote.objects.urls import RemoteUrl, StoreSettings, parse_url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket", RemoteUrl("s3", "bucket", "")),
        ("s3://bucket/", RemoteUrl("s3", "bucket", "")),
        ("s3://bucket/team/run-1/", RemoteUrl("s3", "bucket", "team/run-1")),
        ("gs://my.bucket/x", RemoteUrl("gs", "my.bucket", "x")),
        ("az://container/a=b/c+d", RemoteUrl("az", "container", "a=b/c+d")),
        ("oss://bucket/prefix", RemoteUrl("oss", "bucket", "prefix")),
        ("file:///mnt/nas//ciuic/", RemoteUrl("file", "", "/mnt/nas/ciuic")),
        ("file:///mnt/a b/ü", RemoteUrl("file", "", "/mnt/a b/ü")),
        ("memory://name", RemoteUrl("memory", "name", "")),
        ("ssh://nas/srv//ciuic/", RemoteUrl("ssh", "nas", "/srv/ciuic")),
        ("ssh://me@Nas.example:2222/~/ciuic", RemoteUrl("ssh", "me@Nas.example:2222", "/~/ciuic")),
        ("ssh://[2001:db8::1]:22/a b", RemoteUrl("ssh", "[2001:db8::1]:22", "/a b")),
    ],
)
def test_a_url_names_a_place(text: str, expected: RemoteUrl) -> None:
    """A URL is parsed into its parts, and the normal form of it is parsed into the same."""
    assert parse_url(text) == expected
    assert parse_url(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bucket/prefix", "is a URL"),
        ("/mnt/nas", "is a URL"),
        ("s3:bucket", "is a URL"),
        ("ftp://bucket/x", "cannot have the scheme 'ftp'"),
        ("s3://", "not the name of a bucket"),
        ("s3:///prefix", "not the name of a bucket"),
        ("s3://b", "not the name of a bucket"),
        ("az://-x/p", "not the name of a container"),
        ("s3://bucket:9000/x", "no user, password, port"),
        ("s3://bucket/x?region=y", "no user, password, port"),
        ("s3://bucket/x#y", "no user, password, port"),
        ("s3://bucket/a//b", "the prefix of a remote has parts"),
        ("s3://bucket/../b", "the prefix of a remote has parts"),
        ("s3://bucket/.b", "the prefix of a remote has parts"),
        ("s3://bucket/a b", "the prefix of a remote has parts"),
        ("s3://bucket/" + "a" * 256, "at most 255"),
        ("file://host/x", "three slashes"),
        ("file:///", "directory of its own"),
        ("ssh://host", "directory of its own"),
        ("ssh://host/~", "directory of its own"),
        ("ssh:///srv", "not the name of a host"),
        ("ssh://-oProxyCommand=x/srv", "not the name of a host"),
        ("ssh://-lx@host/srv", "not the name of a user"),
        ("ssh://@host/srv", "not the name of a user"),
        ("ssh://host:0/srv", "port"),
        ("ssh://host:ssh/srv", "port"),
        ("ssh://host/srv?x=y", "alone"),
        ("ssh://host/a/../b", "absolute path without"),
        ("file:///a/../b", "absolute path without"),
        ("file:///a%20b", "absolute path without"),
        ("s3://[::1/x", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_url_is_said(text: str, words: str) -> None:
    """Each kind of mistake has its own message."""
    with pytest.raises(UsageError, match=words):
        parse_url(text)


@pytest.mark.parametrize(
    "text",
    ["s3://key:secret@bucket/x", "https://key:secret@host", "s3://bucket@secret/x", "ssh://me:secret@host/x"],
)
def test_a_password_is_not_repeated(text: str) -> None:
    """A URL with a password is refused with a message that does not show it."""
    with pytest.raises(UsageError) as error:
        parse_url(text)
    assert "secret" not in f"{error.value} {error.value.hint}"


@given(st.sampled_from(["s3", "gs", "az", "oss", "ssh", "file", "memory", "x"]), st.text(max_size=30))
def test_any_text_is_a_place_or_refused(scheme: str, rest: str) -> None:
    """Whatever stands behind a scheme is refused, or has one normal form that is safe to put before names."""
    try:
        url = parse_url(f"{scheme}://{rest}")
    except UsageError:
        return
    assert parse_url(str(url)) == url
    assert not url.prefix.endswith("/")
    assert ".." not in url.prefix.split("/")
    # No part of it becomes an option of ssh.
    if scheme == "ssh":
        *options, end, host = url.ssh_options
        assert end == "--"
        assert set(options[::2]) <= {"-l", "-p"}
        assert host
        assert not any(value.startswith("-") for value in (host, *options[1::2]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"endpoint": "minio:9000"}, "must be a URL"),
        ({"endpoint": "ftp://minio"}, "must be a URL"),
        ({"endpoint": "https://"}, "must be a URL"),
        ({"endpoint": "https://host:port"}, "must be a URL"),
        ({"endpoint": "https://user:secret@host"}, "must not have a user"),
        ({"endpoint": "https://host/?sig=secret"}, "must not have a user"),
        ({"region": "eu west"}, "region of a remote"),
        ({"account": "Name!"}, "account of a remote"),
        ({"storage_class": "COLD;"}, "storage_class of a remote"),
    ],
)
def test_what_is_wrong_with_a_setting_is_said(settings: dict[str, str], words: str) -> None:
    """A setting that no store could use is refused, without repeating a password."""
    with pytest.raises(UsageError, match=words) as error:
        StoreSettings(**settings)  # type: ignore[arg-type]
    assert "secret" not in f"{error.value} {error.value.hint}"
