"""Preemption notices of the large clouds, polled from the metadata services of the machine.

Guarantees: each notice is reported once, and its end where the service takes it back; a service that does not answer is
reported once, and polled again less often; nothing here ends the process. A reply is hostile: its size, its time and the number of
its notices are limited, no redirect is followed, and no proxy and no name server is asked. The threads run in the writer of a
training, and in a process of the daemon's.

===== ==============================================================================================================
aws   https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and `rebalance-recommendations`,
      with session tokens (IMDSv2)
gcp   https://cloud.google.com/compute/docs/instances/create-use-preemptible: ``preempted`` and ``maintenance-event``, by long polling
azure https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
===== ==============================================================================================================
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Final, NamedTuple

import msgspec

from ciuic.printable import one_line
from ciuic.types import Cloud

_ENDPOINTS: Final[dict[str, str]] = {
    "aws": "http://169.254.169.254",
    # Where metadata.google.internal leads: a link-local address cannot lead out of the machine, a name could.
    "gcp": "http://169.254.169.254",
    "azure": "http://169.254.169.254",
}
_ANSWER_SECONDS: Final = 5.0
# The first request turns scheduled events on for the machine, which takes up to two minutes.
_FIRST_AZURE_SECONDS: Final = 130.0
# Shortest pause after a failed request.
_UNREACHABLE_SECONDS: Final = 60.0
# Shortest notice of all three clouds; assumed where a notice has no time.
_MIN_NOTICE_SECONDS: Final = 30.0
_GCP_WAIT_SECONDS: Final = 60
# Not Freeze, after which the machine goes on.
_AZURE_ENDS: Final = ("Preempt", "Terminate", "Redeploy", "Reboot")
# Another program at that address must not fill the memory of this one, nor ask for a snapshot after another.
_MAX_ANSWER_BYTES: Final = 1 << 20
_MAX_NOTICES: Final = 32
_MAX_TEXT_CHARACTERS: Final = 200


class MetadataService(msgspec.Struct, frozen=True):
    """Metadata service to poll.

    Args:
        cloud: ``aws``, ``gcp`` or ``azure``.
        endpoint: Address to use instead of the cloud's own, for tests and proxies.
        poll_seconds: Pause between two requests.
        grace_seconds: Time until the end where a notice has none of its own.
    """

    cloud: Cloud
    endpoint: str = ""
    poll_seconds: float = 5.0
    grace_seconds: float = _MIN_NOTICE_SECONDS

    def __post_init__(self) -> None:
        if self.cloud not in _ENDPOINTS:
            raise ValueError(f"cloud must be one of {', '.join(_ENDPOINTS)}, got {self.cloud!r}")


class CloudNotice(NamedTuple):
    """A preemption notice."""

    key: str
    """Identity of the event; equal if the service reports it again."""
    text: str
    seconds: float
    """Time until the machine goes."""
    certain: bool
    """False: the end has only become more likely."""


def watch(
    services: Sequence[MetadataService],
    report: Callable[[CloudNotice], None],
    warn: Callable[[str], None],
    *,
    withdraw: Callable[[CloudNotice], None] = lambda _: None,
) -> None:
    """Start a polling thread for each resource of each service.

    Args:
        services: Services to poll.
        report: Called with each notice, once.
        warn: Called with what is wrong with a service.
        withdraw: Called with a reported notice that the service has no more, once.
    """
    for service in services:
        for poll in _POLLERS[service.cloud]:
            thread = threading.Thread(
                target=_poll_forever,
                args=(service, poll, report, warn, withdraw),
                name="ciuic-notices",
                daemon=True,
            )
            thread.start()


def _poll_forever(
    service: MetadataService,
    poll: _Poll,
    report: Callable[[CloudNotice], None],
    warn: Callable[[str], None],
    withdraw: Callable[[CloudNotice], None],
) -> None:
    def new_client() -> _MetadataClient:
        return _MetadataClient(service.endpoint or _ENDPOINTS[service.cloud], service.grace_seconds)

    client = new_client()
    told: dict[str, CloudNotice] = {}
    reachable = True
    while True:
        try:
            found = poll(client)
            # A service reports the same event at every request until it has happened.
            if found is not None:
                if len(found) > _MAX_NOTICES:
                    raise ValueError(f"it has more than {_MAX_NOTICES} notices")
                notices = {one.key: one for one in map(_shortened, found)}
                for key in told.keys() - notices.keys():
                    withdraw(told.pop(key))
                for key, notice in notices.items():
                    if key not in told:
                        told[key] = notice
                        report(notice)
            reachable = True
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            # Without what was remembered: the token or the etag may be what the service refuses.
            client = new_client()
            if reachable:
                warn(
                    f"the metadata service of {service.cloud} cannot be used, so no notice will come: "
                    f"{one_line(str(error)[:_MAX_TEXT_CHARACTERS])}"
                )
            reachable = False
        time.sleep(service.poll_seconds if reachable else max(service.poll_seconds, _UNREACHABLE_SECONDS))


def _shortened(notice: CloudNotice) -> CloudNotice:
    return notice._replace(
        key=notice.key[:_MAX_TEXT_CHARACTERS], text=one_line(notice.text[:_MAX_TEXT_CHARACTERS])
    )


class _MetadataClient:
    """HTTP client for one resource, with what it has to remember between two requests."""

    def __init__(self, endpoint: str, grace_seconds: float) -> None:
        """Connect to nothing yet."""
        self._endpoint = endpoint.rstrip("/")
        self.grace_seconds = grace_seconds
        self.remembered: dict[str, str] = {}
        # Imported here because the trainer imports this module too, and never makes a request.
        import urllib.request

        class NoRedirects(urllib.request.HTTPRedirectHandler):
            def redirect_request(self, *_: Any) -> None:
                """Refuse: the service is inside of the machine, what it leads to may not be."""

        # The service is inside of the machine, a proxy named by the environment is not.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirects)

    def ask(
        self, path: str, headers: dict[str, str], *, method: str = "GET", seconds: float = _ANSWER_SECONDS
    ) -> tuple[int, str, Mapping[str, str]]:
        """Make a request.

        Returns:
            Status, text and headers; status 401 or 404 with an empty text.

        Raises:
            OSError: There is no service, or it answers with another error, or with what is no HTTP.
        """
        import http.client
        import urllib.error
        import urllib.request

        request = urllib.request.Request(self._endpoint + path, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=seconds) as answer:
                data = bytearray()
                end = time.monotonic() + seconds
                while part := answer.read1(1 << 16):
                    data += part
                    if len(data) > _MAX_ANSWER_BYTES:
                        raise OSError(f"the answer has more than {_MAX_ANSWER_BYTES} bytes")
                    if time.monotonic() > end:
                        raise OSError(f"the answer takes longer than {seconds:.0f} s")
                return answer.status, data.decode("utf-8", "replace"), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (401, 404):
                    return error.code, "", {}
            raise
        except http.client.HTTPException as error:
            raise OSError(f"no answer of HTTP: {error!r}") from error


def _aws(client: _MetadataClient) -> list[CloudNotice] | None:
    if "token" not in client.remembered:
        # Six hours, the longest that the service allows.
        life = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        status, client.remembered["token"], _ = client.ask("/latest/api/token", life, method="PUT")
        if status != 200:
            raise OSError(f"no token: {status}")
    header = {"X-aws-ec2-metadata-token": client.remembered["token"]}
    notices: list[CloudNotice] = []
    # A rebalance recommendation comes earlier than the notice, or without one: the program may go on after
    # its snapshot.
    for path in ("spot/instance-action", "events/recommendations/rebalance"):
        status, text, _ = client.ask(f"/latest/meta-data/{path}", header)
        if status == 401:
            # The token has expired after six hours; the next poll gets another.
            del client.remembered["token"]
            return None
        if status == 200 and path == "spot/instance-action":
            action = json.loads(text)
            seconds = _seconds_until(datetime.fromisoformat(action["time"].replace("Z", "+00:00")))
            notices.append(
                CloudNotice(
                    f"action {action['time']}", f"AWS: spot instance, {action['action']}", seconds, True
                )
            )
        elif status == 200:
            notices.append(CloudNotice(f"rebalance {text}", "AWS: rebalance recommendation", 2 * 60.0, False))
    return notices


def _gcp_of(name: str) -> _Poll:
    def poll(client: _MetadataClient) -> list[CloudNotice] | None:
        """Wait for a change, at most a minute, and return it if it is a notice."""
        # The first request, which has no etag, is answered at once with the value as it is; later ones wait
        # for a change of it.
        etag = client.remembered.get("etag", "")
        wait = f"?wait_for_change=true&last_etag={etag}&timeout_sec={_GCP_WAIT_SECONDS}" if etag else ""
        status, text, headers = client.ask(
            f"/computeMetadata/v1/instance/{name}{wait}",
            {"Metadata-Flavor": "Google"},
            seconds=_GCP_WAIT_SECONDS + _ANSWER_SECONDS,
        )
        client.remembered["etag"] = next(
            (value for name, value in headers.items() if name.lower() == "etag"), ""
        )
        value = text.strip().upper()
        if status != 200:
            return None
        if value not in ("TRUE", "TERMINATE_ON_HOST_MAINTENANCE"):
            return []
        return [CloudNotice(f"{name} {value}", f"GCP: {name} is {value}", client.grace_seconds, True)]

    return poll


def _azure(client: _MetadataClient) -> list[CloudNotice] | None:
    first = "name" not in client.remembered
    if first:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        client.remembered["name"] = client.ask(path, {"Metadata": "true"})[1].strip()
    status, text, _ = client.ask(
        "/metadata/scheduledevents?api-version=2020-07-01",
        {"Metadata": "true"},
        seconds=_FIRST_AZURE_SECONDS if first else _ANSWER_SECONDS,
    )
    if status != 200:
        return None
    from email.utils import parsedate_to_datetime

    notices: list[CloudNotice] = []
    for event in json.loads(text)["Events"]:
        kind, name = event["EventType"], client.remembered["name"]
        # The service reports events of other machines in the same scale set as well.
        if kind in _AZURE_ENDS and (not name or name in event.get("Resources", [name])):
            before = event.get("NotBefore", "")
            seconds = _seconds_until(parsedate_to_datetime(before)) if before else client.grace_seconds
            notices.append(CloudNotice(str(event["EventId"]), f"Azure: {kind}", seconds, True))
    return notices


_Poll = Callable[[_MetadataClient], "list[CloudNotice] | None"]
"""Returns the notices that stand; None if the service did not say."""
_POLLERS: Final[dict[str, tuple[_Poll, ...]]] = {
    "aws": (_aws,),
    "gcp": (_gcp_of("preempted"), _gcp_of("maintenance-event")),
    "azure": (_azure,),
}


def _seconds_until(moment: datetime) -> float:
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return max(0.0, (moment - datetime.now(timezone.utc)).total_seconds())
