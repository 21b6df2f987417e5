"""Object stores that are not installed with the tests: azurite and Ceph, for `make torture ARGS=remote`.

azurite: ``npm install azurite``, then CIUIC_AZURITE names ``node_modules/.bin/azurite-blob``.
Ceph: Debian's radosgw, ceph-mon, ceph-osd, ceph-mgr and ceph-common; 1.5 GB of memory.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote

from support.object_servers import ACCESS_KEY, SECRET_KEY, connect_s3, environment_for_s3, free_ports

from ciuic.remote.objects.obstore_objects import Clients, ObstoreObjects
from ciuic.remote.objects.urls import StoreSettings, parse_url

_CEPH_PROGRAMS = ("radosgw", "ceph-mon", "ceph-osd", "ceph-mgr", "ceph", "radosgw-admin", "ceph-authtool")
_CEPH_SCRIPT = Path(__file__).with_name("ceph_up.sh")
_START_TIMEOUT_SECONDS = 240
# The account and key that every Azure emulator has, as its documentation says.
_AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def azurite_program() -> str:
    """Return the program of azurite, or an empty text."""
    named = os.environ.get("CIUIC_AZURITE", "")
    return named if named and os.access(named, os.X_OK) else shutil.which("azurite-blob") or ""


def ceph_is_installed() -> bool:
    """Return whether all programs of a Ceph with radosgw are there."""
    return all(shutil.which(program) for program in _CEPH_PROGRAMS)


class Azurite:
    """Emulator of Azure's blob store."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""

    def start(self) -> None:
        """Start the server and make a container."""
        self._place.mkdir(parents=True)
        (port,) = free_ports(1)
        self.endpoint = f"http://127.0.0.1:{port}"
        options = [
            "--silent",
            "--location",
            str(self._place),
            "--blobHost",
            "127.0.0.1",
            "--blobPort",
            str(port),
        ]
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "--",
            azurite_program(),
            *options,
            "--skipApiVersionCheck",
            # Tests send nobody anything.
            "--disableTelemetry",
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        _wait_for_port(port)
        assert self._make_container("tests") == 201

    def stop(self) -> None:
        """Kill the server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)

    def new_url(self) -> str:
        """Return the URL of a new prefix."""
        return f"az://tests/{uuid.uuid4().hex}"

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """Return the environment in which programs find this server, perhaps through a proxy."""
        fields = f"AccountName={_AZURE_ACCOUNT};AccountKey={_AZURE_KEY};"
        text = f"{fields}BlobEndpoint={endpoint or self.endpoint}/{_AZURE_ACCOUNT}"
        return {"AZURE_STORAGE_CONNECTION_STRING": text, "NO_PROXY": "127.0.0.1"}

    def connect(self, url: str, endpoint: str = "") -> ObstoreObjects:
        """Return a client, perhaps through a proxy."""
        where, settings = parse_url(url), StoreSettings()
        return ObstoreObjects(where, settings, clients=Clients(where, settings, self.environment(endpoint)))

    def _make_container(self, name: str) -> int:
        """Make a container, which obstore does not; "Authorize with Shared Key", Azure Storage REST API."""
        now = datetime.now(timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"x-ms-date": now, "x-ms-version": "2021-08-06"}
        lines = "".join(f"{key}:{value}\n" for key, value in headers.items())
        resource = f"/{_AZURE_ACCOUNT}/{_AZURE_ACCOUNT}/{name}\nrestype:container"
        text = "PUT" + "\n" * 12 + lines + resource
        tag = hmac.new(base64.b64decode(_AZURE_KEY), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {_AZURE_ACCOUNT}:{base64.b64encode(tag).decode()}"
        path = f"/{_AZURE_ACCOUNT}/{name}?restype=container"
        return _ask(self.endpoint, "PUT", path, headers, b"")


class Ceph:
    """One-node Ceph with radosgw: an old store that knows If-None-Match in part."""

    endpoint = "http://127.0.0.1:17480"

    def __init__(self, place: Path) -> None:
        self._place = place

    def start(self) -> None:
        """Start the daemons, and make a bucket and a versioned one."""
        self._place.mkdir(parents=True)
        environment = {**os.environ, "ACCESS_KEY": ACCESS_KEY, "SECRET_KEY": SECRET_KEY}
        log = self._place.with_suffix(".log")
        with open(log, "wb") as output:
            subprocess.run(
                ["bash", str(_CEPH_SCRIPT), str(self._place)],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=_START_TIMEOUT_SECONDS,
                check=True,
            )
        for bucket in ("tests", "versioned"):
            assert self._signed("PUT", f"/{bucket}", "", b"") == 200
        xml = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
        assert self._signed("PUT", "/versioned", "versioning", xml) == 200

    def stop(self) -> None:
        """Kill the daemons that the script started."""
        for file in (self._place / "run").glob("*.pid"):
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)

    def new_url(self, bucket: str = "tests") -> str:
        """Return the URL of a new prefix."""
        return f"s3://{bucket}/{uuid.uuid4().hex}"

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """Return the environment in which programs find this server, perhaps through a proxy."""
        return environment_for_s3(endpoint or self.endpoint)

    def connect(self, url: str, endpoint: str = "") -> ObstoreObjects:
        """Return a client, perhaps through a proxy."""
        return connect_s3(url, endpoint or self.endpoint)

    def _signed(self, method: str, path: str, query: str, body: bytes) -> int:
        """Send a signed request about a bucket, which obstore has none for; AWS Signature Version 4."""
        now = datetime.now(timezone.utc)
        date, stamp = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
        digest = hashlib.sha256(body).hexdigest()
        headers = {
            "host": self.endpoint.removeprefix("http://"),
            "x-amz-content-sha256": digest,
            "x-amz-date": stamp,
        }
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        asked = f"{quote(query)}=" if query else ""
        request = "\n".join([method, path, asked, lines, names, digest])
        scope = f"{date}/us-east-1/s3/aws4_request"
        text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()])
        key = b"AWS4" + SECRET_KEY.encode()
        for part in (date, "us-east-1", "s3", "aws4_request", text):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
        )
        return _ask(self.endpoint, method, path + (f"?{query}" if query else ""), headers, body)


def _ask(endpoint: str, method: str, path: str, headers: dict[str, str], body: bytes) -> int:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=60)
    try:
        connection.request(method, path, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
