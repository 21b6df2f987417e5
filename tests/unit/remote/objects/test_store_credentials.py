"""Credentials from shared files, programs and metadata, and the clients that are made with them."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from support.object_servers import ACCESS_KEY, SECRET_KEY, Fault, FaultProxy, SeaweedFS, connect_s3

from ciuic.errors import CiuicError, UsageError
from ciuic.remote.objects import credentials
from ciuic.remote.objects.credentials import (
    AlibabaProvider,
    AwsProfile,
    NoCredentials,
    Secret,
    aws_provider,
    azure_connection,
)
from ciuic.remote.objects.model import RemoteRefused
from ciuic.remote.objects.obstore_objects import Clients
from ciuic.remote.objects.urls import StoreSettings, parse_url

SECRET = "sEcReT-kEy-of-this-test"


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Return an environment with a home directory that has AWS's shared files."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        f"[default]\naws_access_key_id = AK1\naws_secret_access_key = {SECRET}\n"
        f"[team]\naws_access_key_id = AK2\naws_secret_access_key = {SECRET}2\naws_session_token = tok%en\n"
    )
    (tmp_path / ".aws/config").write_text(
        "[default]\nregion = eu-west-3\n[profile team]\nregion = eu-north-1\nendpoint_url = https://s3.team.example\n"
        "[profile role]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = default\n"
        f"[profile program]\ncredential_process = {sys.executable} {tmp_path}/program.py 'a b'\n"
        "[profile empty]\nregion = us-west-1\n"
    )
    return {"HOME": str(tmp_path)}


def test_the_shared_files_of_aws(home: dict[str, str]) -> None:
    """Keys come from the chosen profile, whose settings come from both files; a rotated key is seen."""
    default = aws_provider(home)
    assert default is not None
    assert default()["access_key_id"] == "AK1"
    assert default()["token"] is None
    team = AwsProfile({**home, "AWS_PROFILE": "team"})
    secret = team.secret()
    assert secret is not None
    assert (secret.access_key_id, secret.secret_access_key, secret.token) == ("AK2", SECRET + "2", "tok%en")
    assert team.values()["endpoint_url"] == "https://s3.team.example"
    file = Path(home["HOME"], ".aws/credentials")
    file.write_text(file.read_text().replace("AK1", "AK9"))
    assert default()["access_key_id"] == "AK9"
    file.write_text("")
    with pytest.raises(NoCredentials, match="no access key any more"):
        default()


def test_the_parts_of_a_key_come_from_one_file(home: dict[str, str]) -> None:
    """A token in the other file belongs to another key; and while a file is written in place, nothing of it is taken."""
    config, file = (Path(home["HOME"], ".aws", name) for name in ("config", "credentials"))
    triple = "aws_access_key_id=K\naws_secret_access_key=S\naws_session_token=T\n"
    config.write_text(f"[default]\n{triple}")
    file.write_text(f"[default]\n{triple.partition('aws_session')[0].replace('=', '=other-')}")
    secret = AwsProfile(home).secret()
    assert secret is not None
    assert (secret.access_key_id, secret.token) == ("other-K", None)
    file.write_text("[default]\naws_access_key_id=half\n")
    secret = AwsProfile(home).secret()
    assert secret is not None
    assert (secret.access_key_id, secret.token) == ("K", "T")


def test_the_order_of_places(home: dict[str, str], tmp_path: Path) -> None:
    """The environment and a web identity come before the files, and files that are not there are no error."""
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    assert aws_provider({**home, **keys}) is None
    assert aws_provider({**home, "AWS_WEB_IDENTITY_TOKEN_FILE": "/x"}) is None
    assert aws_provider({"HOME": str(tmp_path / "nobody")}) is None
    assert aws_provider({**home, "AWS_PROFILE": "empty"}) is None
    other = {"AWS_SHARED_CREDENTIALS_FILE": f"{tmp_path}/.aws/credentials", "AWS_CONFIG_FILE": "/dev/null"}
    assert aws_provider({"HOME": "/nowhere", **other}) is not None


@pytest.mark.parametrize(
    ("profile", "words"), [("nobody", "no profile 'nobody'"), ("role", "assumes a role or signs in")]
)
def test_a_profile_that_cannot_be_used_is_told(home: dict[str, str], profile: str, words: str) -> None:
    """A profile that is missing or needs AWS's tools is an error, not the next place's key."""
    with pytest.raises(NoCredentials, match=words):
        aws_provider({**home, "AWS_PROFILE": profile})


def test_a_program_gives_the_key(home: dict[str, str], tmp_path: Path) -> None:
    """`credential_process` is run without a shell, once until its key is about to expire; what else it does is an error without its output."""
    environment = {**home, "AWS_PROFILE": "program"}
    program = tmp_path / "program.py"
    reply = {
        "Version": 1,
        "AccessKeyId": "AK",
        "SecretAccessKey": SECRET,
        "Expiration": "2099-01-01T00:00:00Z",
    }
    program.write_text(f"import sys; assert sys.argv[1] == 'a b'; print({json.dumps(reply)!r})")
    provider = aws_provider(environment)
    assert provider is not None
    credential = provider()
    assert (credential["access_key_id"], credential["secret_access_key"]) == ("AK", SECRET)
    assert credential["expires_at"] == datetime(2099, 1, 1, tzinfo=timezone.utc) - timedelta(minutes=5)
    program.write_text("raise SystemExit(1)")
    assert provider() == credential
    for text in (
        f"print('{SECRET}')",
        f"raise SystemExit('{SECRET}')",
        f'print(\'{{"AccessKeyId":"{SECRET}"}}\')',
    ):
        program.write_text(text)
        with pytest.raises(NoCredentials, match="credential_process of profile 'program'") as error:
            AwsProfile(environment).secret()
        assert SECRET not in f"{error.value!r} {error.value.hint} {error.value.__cause__!r}"


def test_a_broken_file_shows_no_key(tmp_path: Path) -> None:
    """A file that is not sections of keys, or not text, is an error that repeats nothing of it."""
    file = tmp_path / "credentials"
    environment = {"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_CONFIG_FILE": "/dev/null"}
    for content in (SECRET.encode(), b"[default]\n" + SECRET.encode() + b"\n", b"\xff" + SECRET.encode()):
        file.write_bytes(content)
        with pytest.raises(NoCredentials, match=f"cannot read the credentials in {file}") as error:
            aws_provider(environment)
        assert SECRET not in f"{error.value!r} {error.value.hint} {error.value.__cause__!r}"


def test_repr_shows_no_key() -> None:
    """The text of a key, as in a traceback's locals, has none of it."""
    assert SECRET not in repr(Secret("AK", SECRET, SECRET))


def test_azure_takes_a_connection_string() -> None:
    """A connection string is taken apart; keys with equal signs stay whole; without an account it is refused."""
    text = (
        "DefaultEndpointsProtocol=https;AccountName=acc0;AccountKey=aGVsbG8=;EndpointSuffix=core.windows.net"
    )
    assert azure_connection({"AZURE_STORAGE_CONNECTION_STRING": text}) == {
        "account_name": "acc0",
        "account_key": "aGVsbG8=",
    }
    where = parse_url("az://container/x")
    assert "acc0" in repr(Clients(where, StoreSettings(), {"AZURE_STORAGE_CONNECTION_STRING": text}).small)
    assert "acc1" in repr(Clients(where, StoreSettings(account="acc1"), {}).small)
    with pytest.raises(UsageError, match="needs the name of the storage account"):
        Clients(where, StoreSettings(), {})


def test_incomplete_keys_are_told(home: dict[str, str]) -> None:
    """Half a key in the environment is told when the remote is opened, without the half."""
    with pytest.raises(RemoteRefused, match="credentials or settings are incomplete") as error:
        connect_s3("s3://bucket/x", "http://127.0.0.1:1", environment={"AWS_SECRET_ACCESS_KEY": SECRET})
    assert SECRET not in repr(error.value)


def test_a_bucket_is_opened_with_a_profile(
    seaweedfs: SeaweedFS, home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are signed with the profile's key, and a key that is gone is told with the place."""
    file = Path(home["HOME"], ".aws/credentials")
    file.write_text(f"[default]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\n")
    # obstore itself reads the environment of the process.
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(credentials, "_FILE_LIFETIME", timedelta(0))
    url = seaweedfs.new_url()
    objects = connect_s3(url, seaweedfs.endpoint, environment=home)
    objects.put("name", [b"x"])
    assert objects.get("name") == b"x"
    other = connect_s3(url, seaweedfs.endpoint, environment=home)
    file.write_text("")
    with pytest.raises(RemoteRefused, match="profile 'default' has no access key any more"):
        other.get("name")


class _Metadata(http.server.BaseHTTPRequestHandler):
    """Metadata service of an instance of Alibaba Cloud."""

    def do_PUT(self) -> None:
        self._answer(b"token-of-metadata" if self.path == "/latest/api/token" else b"")

    def do_GET(self) -> None:
        if self.headers.get("X-aliyun-ecs-metadata-token") != "token-of-metadata":
            self.send_error(403)
        elif self.path.endswith("/security-credentials/"):
            self._answer(b"role-1")
        else:
            key = {
                "AccessKeyId": "STS.1",
                "AccessKeySecret": SECRET,
                "SecurityToken": "T",
                "Expiration": "2099-01-01T00:00:00Z",
            }
            self._answer(json.dumps(key).encode() if self.path.endswith("/role-1") else b"")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def metadata_url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metadata)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_places_of_alibaba_cloud(tmp_path: Path, metadata_url: str) -> None:
    """Keys for OSS come from the environment, then ossutil's file, then the RAM role of the instance."""
    home = {"HOME": str(tmp_path)}
    given = {"ALIBABA_CLOUD_ACCESS_KEY_ID": "env", "ALIBABA_CLOUD_ACCESS_KEY_SECRET": SECRET}
    assert AlibabaProvider({**home, **given}, metadata_url)()["access_key_id"] == "env"
    role = AlibabaProvider(home, metadata_url)()
    assert (role["access_key_id"], role["token"]) == ("STS.1", "T")
    (tmp_path / ".ossutilconfig").write_text(
        f"[Credentials]\naccessKeyID=file\naccessKeySecret={SECRET}\nstsToken=t\n"
    )
    found = AlibabaProvider(home, metadata_url)()
    assert (found["access_key_id"], found["secret_access_key"], found["token"]) == ("file", SECRET, "t")
    (tmp_path / ".ossutilconfig").unlink()
    with pytest.raises(NoCredentials, match="no credentials for OSS"):
        AlibabaProvider(home, "http://127.0.0.1:1")()


def test_oss_creates_by_its_own_header(seaweedfs: SeaweedFS, fault_proxy: FaultProxy) -> None:
    """On OSS a create carries the header that forbids overwriting and no If-None-Match, a put neither; 409 is taken."""
    keys = {"OSS_ACCESS_KEY_ID": "test-access-key", "OSS_ACCESS_KEY_SECRET": "wrong"}
    fault_proxy.fault = lambda request: Fault(
        status=409 if "x-oss-forbid-overwrite" in request.headers else 200,
        body=b"<Error><Code>FileAlreadyExists</Code></Error>",
    )
    objects = connect_s3("oss://bucket/x", fault_proxy.endpoint, environment=keys, virtual_hosted=False)
    assert not objects.create("w/a/0", b"entry")
    # The answer of 200 has no tag of the object, which obstore asks for.
    with pytest.raises(CiuicError):
        objects.put("packs/a", [b"x"])
    creates, puts = fault_proxy.requests[0], fault_proxy.requests[-1]
    assert creates.headers["x-oss-forbid-overwrite"] == "true"
    assert "if-none-match" not in creates.headers
    assert "x-oss-forbid-overwrite" not in puts.headers


def test_the_places_of_stores() -> None:
    """Regions and endpoints become the hosts that are asked, with the bucket in the host where the store wants it."""

    def endpoint(url: str, settings: StoreSettings, **environment: str) -> object:
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "HOME": "/nowhere"}
        client = Clients(parse_url(url), settings, {**keys, **environment}).small
        return client.config.get("endpoint")  # type: ignore[union-attr]

    assert (
        endpoint("oss://b0b/x", StoreSettings(region="cn-hangzhou"))
        == "https://b0b.s3.oss-cn-hangzhou.aliyuncs.com"
    )
    internal = StoreSettings(
        region="cn-hangzhou", endpoint="https://s3.oss-cn-hangzhou-internal.aliyuncs.com"
    )
    assert endpoint("oss://b0b/x", internal) == "https://b0b.s3.oss-cn-hangzhou-internal.aliyuncs.com"
    assert (
        endpoint("s3://b0b/x", StoreSettings(), AWS_ENDPOINT_URL="https://minio:9000") == "https://minio:9000"
    )
    assert endpoint("s3://b0b/x", StoreSettings(virtual_hosted=True, endpoint="https://h")) == "https://b0b.h"
    assert endpoint("s3://b0b/x", StoreSettings()) is None
    with pytest.raises(UsageError, match="needs a region"):
        Clients(parse_url("oss://b0b/x"), StoreSettings(), {})


def test_a_storage_class_is_for_data_alone(seaweedfs: SeaweedFS, fault_proxy: FaultProxy) -> None:
    """Data packs are stored in the class that is set; trees, manifests and logs stay in the bucket's own."""
    objects = fault_proxy.connect(seaweedfs.new_url(), storage_class="STANDARD_IA")
    objects.put("packs/data/00/a", [b"x"])
    objects.put("repositories/r/packs/data/00/a", [b"x"])
    objects.put("packs/meta/00/a", [b"x"])
    objects.create("w/a/0", b"x")
    classes = [request.headers.get("x-amz-storage-class") for request in fault_proxy.requests]
    assert classes == ["STANDARD_IA", "STANDARD_IA", None, None]
