"""Faults between client and store: lost replies, errors for a time, cut bodies, and what the messages say."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import pytest
from support.object_servers import (
    ACCESS_KEY,
    SECRET_KEY,
    Fault,
    FaultProxy,
    Request,
    SeaweedFS,
    connect_s3,
    environment_for_s3,
)

from ciuic.errors import CiuicError
from ciuic.remote.objects import obstore_objects
from ciuic.remote.objects.model import (
    CutReply,
    NonsenseReply,
    NoSuchBucket,
    NoSuchObject,
    NotAListing,
    RemoteFull,
    RemoteRefused,
    RemoteUnreachable,
    TooLargeObject,
)
from ciuic.remote.objects.obstore_objects import ObstoreObjects
from ciuic.remote.reading.retry_policy import RetryingObjects, RetryPolicy

Connect = Callable[[], ObstoreObjects]


@pytest.fixture
def connect(seaweedfs: SeaweedFS, fault_proxy: FaultProxy) -> Connect:
    url = seaweedfs.new_url()
    return lambda: fault_proxy.connect(url)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients give up at once: what comes after that is not theirs to do."""
    for retry in (obstore_objects._RETRY, obstore_objects._RETRY_BODIES):
        monkeypatch.setitem(retry, "max_retries", 0)
    monkeypatch.setattr(obstore_objects, "_UNANSWERED_PAUSES_SECONDS", ())


def on(method: str, *faults: Fault | None) -> Callable[[Request], Fault | None]:
    """Return a plan that gives the requests of a method these faults in turn, then none."""
    left = iter(faults)
    return lambda request: next(left, None) if request.method == method else None


def on_any(*faults: Fault | None) -> Callable[[Request], Fault | None]:
    """Return a plan that gives requests these faults in turn, then none."""
    left = iter(faults)
    return lambda _request: next(left, None)


def test_a_put_whose_reply_is_lost_is_done_again(connect: Connect, fault_proxy: FaultProxy) -> None:
    """A PUT whose reply is lost twice is sent again, and the object is there."""
    objects = connect()
    fault_proxy.fault = on("PUT", Fault(drops_reply=True), Fault(drops_reply=True))
    objects.put("name", [b"content"])
    assert objects.get("name") == b"content"
    assert fault_proxy.methods()["PUT"] == 3


@pytest.mark.usefixtures("impatient")
def test_a_create_whose_reply_is_lost_has_created(
    connect: Connect, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A create whose reply is lost is not sent again, and raises; the next one returns False, and the object is the caller's own."""
    monkeypatch.setattr(obstore_objects, "_UNANSWERED_PAUSES_SECONDS", (0.0, 0.0))
    objects = connect()
    fault_proxy.fault = on("PUT", Fault(drops_reply=True))
    with pytest.raises(RemoteUnreachable, match="cannot create name"):
        objects.create("name", b"nonce of mine")
    assert fault_proxy.methods()["PUT"] == 1
    assert not objects.create("name", b"nonce of mine")
    assert objects.get("name") == b"nonce of mine"


def test_a_create_that_is_sent_again_does_not_overwrite(connect: Connect, fault_proxy: FaultProxy) -> None:
    """Whatever the client does after a lost reply, the first object of the name stays."""
    objects, other = connect(), connect()
    assert other.create("name", b"other")
    fault_proxy.fault = on("PUT", Fault(drops_reply=True), Fault(drops_reply=True))
    try:
        assert not objects.create("name", b"mine")
    except RemoteUnreachable:
        assert not objects.create("name", b"mine")
    assert objects.get("name") == b"other"


def test_errors_for_a_time_are_waited_for(connect: Connect, fault_proxy: FaultProxy) -> None:
    """Three answers of 503 are waited for in every operation; nothing is lost or seen twice."""
    objects = connect()
    objects.put("there", [b"0123456789"])

    def three_in_a_row() -> Callable[[Request], Fault | None]:
        answers = itertools.count()
        return lambda _request: Fault(status=503) if next(answers) < 3 else None

    operations: list[Callable[[], object]] = [
        lambda: objects.put("new", [b"x"]),
        lambda: objects.create("created", b"x"),
        lambda: objects.get("there") == b"0123456789",
        lambda: objects.get_ranges("there", [(1, 3)])[0] == b"123",
        lambda: objects.tail("there", 2) == (10, b"89"),
        lambda: objects.info("there") is not None,
        lambda: [info.name for info in objects.list("")] == ["created", "new", "there"],
        lambda: objects.delete(["new", "created"]),
    ]
    for operation in operations:
        fault_proxy.fault = three_in_a_row()
        assert operation() is not False
    assert [info.name for info in objects.list("")] == ["there"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_answers_that_pass_are_waited_for_when_the_client_gives_up(
    connect: Connect, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """A request that obstore gave up is sent again, whichever answer it was that may pass; nothing is lost or seen twice."""
    monkeypatch.setattr(obstore_objects, "_UNANSWERED_PAUSES_SECONDS", (0.0,) * 4)
    objects = connect()
    objects.put("there", [b"x"])
    for operation in _operations(objects):
        fault_proxy.fault = on_any(*[Fault(status=status)] * 4)
        operation()
    assert [(info.name, objects.get(info.name)) for info in objects.list("")] == [("name", b"x")]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_errors_that_may_pass_are_told_as_such(
    connect: Connect, fault_proxy: FaultProxy, status: int
) -> None:
    """A store that answers 429 or 5xx all the time is unreachable in every operation: waiting may help."""
    objects = connect()
    objects.put("there", [b"x"])
    fault_proxy.fault = lambda _request: Fault(status=status)
    for operation in _operations(objects):
        with pytest.raises(RemoteUnreachable, match=f"answered {status}"):
            operation()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("status", [400, 401, 403, 405, 501])
def test_errors_that_stay_are_told_as_such(connect: Connect, fault_proxy: FaultProxy, status: int) -> None:
    """A store that refuses with 4xx, or has no such operation, is told as a refusal: waiting changes nothing."""
    objects = connect()
    objects.put("there", [b"x"])
    fault_proxy.fault = lambda _request: Fault(status=status, body=b"")
    for operation in _operations(objects):
        with pytest.raises(RemoteRefused, match=f"answered {status}|answered nothing"):
            operation()


WELL_FORMED = b"<!DOCTYPE html><html><body><h1>Please log in</h1></body></html>"


def on_listings(*faults: Fault | None) -> Callable[[Request], Fault | None]:
    left = iter(faults)
    return lambda request: next(left, None) if "list-type" in request.path else None


@pytest.mark.parametrize(
    "body",
    [
        WELL_FORMED,
        b"<html><head><meta charset=utf-8></head><body>Please log in<br></body></html>",
        b"Please log in",
        b"",
        b"<?xml version='1.0'?><ListBucketResult><Contents><Key>there",
    ],
)
def test_page_of_a_proxy_is_no_listing(connect: Connect, fault_proxy: FaultProxy, body: bytes) -> None:
    """A listing that a proxy answered once with a page of its own, or that was cut, is asked for again."""
    objects = connect()
    objects.put("w/there", [b"x"])
    fault_proxy.fault = on_listings(Fault(status=200, body=body))
    assert [info.name for info in objects.list("w/")] == ["w/there"]


def test_page_of_a_proxy_within_a_listing_is_no_end(connect: Connect, fault_proxy: FaultProxy) -> None:
    """A listing of several requests of which a later one was answered with a page has all objects."""
    objects = connect()
    names = [f"w/{number:04}" for number in range(1005)]
    for name in names:
        objects.put(name, [b"x"])
    fault_proxy.fault = on_listings(None, Fault(status=200, body=WELL_FORMED))
    assert [info.name for info in objects.list("w/")] == names


@pytest.mark.usefixtures("impatient")
def test_listings_that_are_none_all_the_time(seaweedfs: SeaweedFS, fault_proxy: FaultProxy) -> None:
    """A proxy that answers every listing with what cannot be one is an error of its own class, which may pass."""
    objects = fault_proxy.connect(seaweedfs.new_url())
    objects._sleep = lambda seconds: None
    fault_proxy.fault = on_listings(*[Fault(status=200, body=b"Please log in")] * 9)
    with pytest.raises(NotAListing, match="cannot list w/: what was answered is not a listing") as error:
        list(objects.list("w/"))
    assert isinstance(error.value, RemoteUnreachable)
    assert "proxy" in error.value.hint


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("repeated", [False, True])
def test_a_listing_whose_pages_begin_again_has_an_end(
    seaweedfs: SeaweedFS, fault_proxy: FaultProxy, repeated: bool
) -> None:
    """Where the store answers each page with the first one, listing ends with an error, also for a caller that repeats requests."""
    plain = fault_proxy.connect(seaweedfs.new_url())
    plain._sleep = lambda seconds: None
    prefix = plain.url.split("/", 3)[3]
    entries = "".join(
        f"<Contents><Key>{prefix}/w/{number:03}</Key><LastModified>2020-01-01T00:00:00.000Z</LastModified><ETag>e</ETag>"
        "<Size>1</Size></Contents>"
        for number in range(100)
    )
    page = (
        f"<ListBucketResult><Name>b</Name><KeyCount>100</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>true</IsTruncated>"
        f"<NextContinuationToken>t</NextContinuationToken>{entries}</ListBucketResult>"
    )
    fault_proxy.fault = lambda request: (
        Fault(status=200, body=page.encode()) if "list-type" in request.path else None
    )
    objects = RetryingObjects(plain, RetryPolicy()) if repeated else plain
    with pytest.raises(NotAListing, match="have no end"):
        list(objects.list("w/"))


_DENIED = "<Error><Key>{key}</Key><Code>{code}</Code><Message>Access Denied</Message></Error>"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("key", "code", "expected"),
    [
        ("there", "AccessDenied", RemoteRefused),
        ("there", "SlowDown", RemoteUnreachable),
        ("there", "InternalError", RemoteUnreachable),
        ("another", "AccessDenied", NonsenseReply),
    ],
)
def test_refusals_within_a_reply_of_success_are_refusals(
    connect: Connect, fault_proxy: FaultProxy, key: str, code: str, expected: type[CiuicError]
) -> None:
    """What DeleteObjects answers for one object counts as an answer for the request would, and one for an unknown object is nonsense."""
    objects = connect()
    name = objects.url.split("/", 3)[3] + f"/{key}"
    body = f"<DeleteResult>{_DENIED.format(key=name, code=code)}</DeleteResult>"
    fault_proxy.fault = on("POST", *[Fault(status=200, body=body.encode())] * 100)
    with pytest.raises(expected) as error:
        objects.delete(["there"])
    if expected is RemoteRefused:
        assert error.value.message == "cannot delete objects: the store answered AccessDenied (Access Denied)"


def _operations(objects: ObstoreObjects) -> Iterator[Callable[[], object]]:
    yield lambda: objects.put("name", [b"x"])
    yield lambda: objects.create("name", b"x")
    yield lambda: objects.get("there")
    yield lambda: objects.get_ranges("there", [(0, 1)])
    yield lambda: objects.tail("there", 1)
    yield lambda: objects.info("there")
    yield lambda: list(objects.list(""))
    yield lambda: objects.delete(["there"])


@pytest.mark.usefixtures("impatient")
def test_a_body_that_is_cut_is_never_returned(connect: Connect, fault_proxy: FaultProxy) -> None:
    """A reply that ends in the middle of its body is read again from there, or an error; never part of an object."""
    objects = connect()
    body = os.urandom(3 << 20)
    objects.put("name", [body])
    reads: list[Callable[[], bytes]] = [
        lambda: objects.get("name"),
        lambda: bytes(objects.get_ranges("name", [(0, 2 << 20)])[0]),
        lambda: objects.tail("name", 2 << 20)[1],
    ]
    for read, expected in zip(reads, [body, body[: 2 << 20], body[-2 << 20 :]], strict=True):
        fault_proxy.fault = on("GET", Fault(cuts_reply_at=1_000_000))
        try:
            assert read() == expected
        except RemoteUnreachable:
            assert read() == expected


@pytest.mark.usefixtures("impatient")
def test_a_put_that_is_cut_leaves_nothing(connect: Connect, fault_proxy: FaultProxy) -> None:
    """A PUT whose connection breaks before the store has it leaves no object."""
    objects = connect()
    fault_proxy.fault = lambda request: Fault(drops_request=True) if request.method == "PUT" else None
    with pytest.raises(RemoteUnreachable, match="cannot store name"):
        objects.put("name", [bytes(1 << 20)])
    assert objects.info("name") is None


def test_an_object_is_one_request(connect: Connect, fault_proxy: FaultProxy) -> None:
    """Objects of any size take one PUT, and a pack's ranges that lie close one GET; no multipart, no LIST."""
    objects = connect()
    body = memoryview(bytes(12 << 20))
    objects.put("packs/large", [body[: 5 << 20], body[5 << 20 :]])
    objects.create("w/a/0", b"entry")
    objects.get_ranges("packs/large", [(number * 70_000, 60_000) for number in range(100)])
    objects.tail("packs/large", 4096)
    assert fault_proxy.methods() == {"PUT": 2, "GET": 2}
    assert not [request for request in fault_proxy.requests if "uploads" in request.path]


def test_a_conflict_of_two_creates_is_tried_again(connect: Connect, fault_proxy: FaultProxy) -> None:
    """409 for another create under way is no answer about the name: the create is sent again."""
    objects = connect()
    conflict = b"<Error><Code>ConditionalRequestConflict</Code></Error>"
    fault_proxy.fault = on("PUT", Fault(status=409, body=conflict), Fault(status=409, body=conflict))
    assert objects.create("name", b"mine")
    assert fault_proxy.methods()["PUT"] == 3
    assert objects.get("name") == b"mine"


@pytest.mark.usefixtures("impatient")
def test_an_object_that_is_too_large_is_not_read(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that is larger than any of ciuic's is refused before its body is in memory."""
    monkeypatch.setattr("ciuic.remote.objects.obstore_objects.MAX_OBJECT_BYTES", 1000)
    objects = connect()
    objects.put("name", [bytes(1001)])
    with pytest.raises(TooLargeObject, match="1001 bytes"):
        objects.get("name")
    assert objects.tail("name", 4) == (1001, bytes(4))


@pytest.mark.usefixtures("impatient")
def test_a_bucket_that_is_missing_is_not_a_missing_object(seaweedfs: SeaweedFS) -> None:
    """Reading and listing a bucket that does not exist says so."""
    objects = seaweedfs.connect("s3://not-there-at-all/x")
    for read in (
        lambda: objects.get("name"),
        lambda: list(objects.list("")),
        lambda: objects.tail("name", 1),
    ):
        with pytest.raises(NoSuchBucket, match="the bucket not-there-at-all does not exist") as error:
            read()
        assert not isinstance(error.value, NoSuchObject)


_PAGE = b"<!DOCTYPE html><html><body><p>Sign in<br></body></html>"
_CLASSES: dict[str, tuple[Fault, type[CiuicError]]] = {
    "bucket": (Fault(status=404, body=b"<Error><Code>NoSuchBucket</Code></Error>"), NoSuchBucket),
    "refused": (Fault(status=403, body=b"<Error><Code>AccessDenied</Code></Error>"), RemoteRefused),
    "unreachable": (Fault(drops_request=True), RemoteUnreachable),
    "nonsense": (Fault(status=404, body=_PAGE), NonsenseReply),
    "nonsense without a page": (Fault(status=302, body=b""), NonsenseReply),
    "full": (Fault(status=507, body=b"<Error><Code>XMinioStorageFull</Code></Error>"), RemoteFull),
    "full by quota": (Fault(status=403, body=b"<Error><Code>QuotaExceeded</Code></Error>"), RemoteFull),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("reply", _CLASSES)
def test_classes_of_errors_are_told_apart(
    reply: str, connect: Connect, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of reply is one class of error, whichever request it answers; HEAD, without a body, tells none apart."""
    monkeypatch.setattr(obstore_objects, "_NONSENSE_PAUSES_SECONDS", (0.0,) * 3)
    objects = connect()
    fault, expected = _CLASSES[reply]
    fault_proxy.fault = lambda request: None if request.method == "HEAD" else fault
    asked = [error for operation in _operations(objects) if (error := _error_of(operation)) is not None]
    assert [type(error) for error in asked if not isinstance(error, expected)] == []
    assert len(asked) >= 6
    if reply == "unreachable":
        assert {type(error) for error in asked} == {RemoteUnreachable}


@pytest.mark.usefixtures("impatient")
def test_a_missing_object_is_no_missing_bucket(connect: Connect, fault_proxy: FaultProxy) -> None:
    """404 for one object says nothing of the bucket: not to a read, and not to a request to store it."""
    objects = connect()
    fault_proxy.fault = lambda _request: Fault(status=404, body=b"<Error><Code>NoSuchKey</Code></Error>")
    assert isinstance(_error_of(lambda: objects.get("name")), NoSuchObject)
    assert isinstance(_error_of(lambda: objects.put("name", [b"x"])), NonsenseReply)
    assert isinstance(_error_of(lambda: objects.create("name", b"x")), NonsenseReply)


def test_a_listing_that_is_cut_is_asked_for_again_for_minutes(
    connect: Connect, fault_proxy: FaultProxy, seaweedfs: SeaweedFS
) -> None:
    """A listing whose body is cut is repeated for four minutes, and then the connection is blamed."""
    waited: list[float] = []
    objects = connect()
    objects._sleep = waited.append
    objects.put("name", [b"x"])
    fault_proxy.fault = lambda _request: Fault(cuts_reply_at=30)
    with pytest.raises(CutReply, match="the connection ended within the reply"):
        list(objects.list(""))
    assert sum(waited) >= 240
    fault_proxy.fault = on("GET", *[Fault(cuts_reply_at=30)] * 5)
    assert [info.name for info in objects.list("")] == ["name"]


def _error_of(operation: Callable[[], object]) -> CiuicError | None:
    try:
        operation()
    except CiuicError as exc:
        return exc
    return None


@pytest.mark.usefixtures("impatient")
def test_no_message_shows_a_credential(seaweedfs: SeaweedFS, fault_proxy: FaultProxy) -> None:
    """No message, hint or cause of an error has a key, a token or a signature, whatever the store answers."""
    token = "session-token-" + "x" * 200
    good = {**environment_for_s3(""), "AWS_SESSION_TOKEN": token}
    bad = {**good, "AWS_SECRET_ACCESS_KEY": "wrong-secret-key-of-these-tests"}
    echo = f"<Error><Code>AccessDenied</Code><Message>{token} {SECRET_KEY} no\n</Message></Error>".encode()
    secrets = {token, SECRET_KEY, ACCESS_KEY, bad["AWS_SECRET_ACCESS_KEY"]}
    seen = 0
    for environment, fault in itertools.product(
        (good, bad),
        (
            None,
            Fault(status=403, body=echo),
            Fault(status=400, body=echo),
            Fault(status=500, body=echo),
            Fault(drops_reply=True),
        ),
    ):
        fault_proxy.fault = lambda _request, fault=fault: fault  # type: ignore[misc]
        objects = connect_s3(seaweedfs.new_url(), fault_proxy.endpoint, environment=environment)
        for operation in _operations(objects):
            error = _error_of(operation)
            if error is None:
                continue
            seen += 1
            text = f"{error} {error.hint} {error!r} {error.__cause__!r}"
            assert error.__suppress_context__
            assert not [secret for secret in secrets if secret in text]
            assert "Signature=" not in text
            assert "\n" not in str(error)
    assert seen > 60


@pytest.mark.parametrize(
    "refusal",
    [
        "<Error><Code>InvalidRequest</Code><Message>Content-MD5 OR x-amz-checksum- HTTP header is required for "
        "Put Object requests with Object Lock parameters</Message></Error>",
        "<Error><Code>MissingContentMD5</Code></Error>",
    ],
)
def test_a_bucket_that_wants_checksums_gets_them(
    connect: Connect, fault_proxy: FaultProxy, refusal: str
) -> None:
    """Where a lock of the bucket makes checksums a duty, whatever is stored has one after the first refusal, and is stored once."""
    refused: list[Request] = []

    def lock(request: Request) -> Fault | None:
        if request.method != "PUT" or "x-amz-checksum-sha256" in request.headers:
            return None
        refused.append(request)
        return Fault(status=400, body=refusal.encode())

    fault_proxy.fault = lock
    objects = connect()
    bodies = {"small": b"content", "middle": os.urandom(1 << 20), "large": os.urandom(9 << 20)}
    for name, body in bodies.items():
        objects.put(name, [body[:5], body[5:]])
    assert objects.create("once", b"nonce")
    assert not objects.create("once", b"other")
    assert {name: objects.get(name) for name in bodies} == bodies
    assert len(refused) == 1


@pytest.mark.usefixtures("impatient")
def test_a_server_that_is_not_there() -> None:
    """A server that does not answer is unreachable, and the message says what failed."""
    objects = connect_s3("s3://bucket/x", "http://127.0.0.1:1")
    with pytest.raises(
        RemoteUnreachable, match=r"cannot read name: no answer from the store \(connection refused\)"
    ):
        objects.get("name")
