"""Notices of the large clouds that a machine is about to be taken away, from the metadata services inside of it.

Guarantees: each event is told once; a service that does not answer is said once and asked again, less often; nothing here ends the
process. It runs in threads of the writer, so that nothing of it is in the training's process.

===== ==============================================================================================================
aws   https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and `rebalance-recommendations`,
      with session tokens (IMDSv2)
gcp   https://cloud.google.com/compute/docs/instances/create-use-preemptible: ``preempted`` and ``maintenance-event``, waiting for change
azure https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
===== ==============================================================================================================
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Final, Literal, NamedTuple

import msgspec

Cloud = Literal["aws", "gcp", "azure"]
_ENDPOINTS: Final[dict[str, str]] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
_ANSWER_SECONDS: Final = 5.0
_FIRST_AZURE_SECONDS: Final = 130.0
"""The first question turns the service on, which takes up to two minutes."""
_UNREACHABLE_SECONDS: Final = 60.0
_SHORTEST_SECONDS: Final = 30.0
"""What all of them give at least; taken where they do not say."""
_GCP_WAIT_SECONDS: Final = 60
_AZURE_ENDS: Final = ("Preempt", "Terminate", "Redeploy", "Reboot")
_LONGEST: Final = 1 << 20


class Metadata(msgspec.Struct, frozen=True):
    """Where to ask: a cloud by its name, and, for tests and proxies, another address."""

    cloud: Cloud
    endpoint: str = ""
    poll_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.cloud not in _ENDPOINTS:
            raise ValueError(f"{self.cloud!r} is none of {', '.join(_ENDPOINTS)}")


class Event(NamedTuple):
    """Something that a service says."""

    key: str
    """Equal for the same event told again."""
    text: str
    seconds: float
    """Until the machine goes."""
    certain: bool
    """False: it is only likelier than before."""


def watch(services: Sequence[Metadata], tell: Callable[[Event], None], say: Callable[[str], None]) -> None:
    """Starts a thread for each place to ask at. ``tell``: each event, once. ``say``: what is wrong with a service."""
    for service in services:
        for place in _PLACES[service.cloud]:
            thread = threading.Thread(
                target=_ask_for_ever, args=(service, place, tell, say), name="ciuic-notices", daemon=True
            )
            thread.start()


def _ask_for_ever(
    service: Metadata,
    place: Callable[[_Asker], Iterator[Event]],
    tell: Callable[[Event], None],
    say: Callable[[str], None],
) -> None:
    asker = _Asker(service.endpoint or _ENDPOINTS[service.cloud])
    told: set[str] = set()
    reachable = True
    while True:
        try:
            for event in place(asker):
                if event.key not in told:
                    told.add(event.key)
                    tell(event)
            reachable = True
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            asker = _Asker(asker.endpoint)
            if reachable:
                say(
                    f"the metadata service of {service.cloud} does not answer as it should, no notice will come: {error}"
                )
            reachable = False
        time.sleep(service.poll_seconds if reachable else max(service.poll_seconds, _UNREACHABLE_SECONDS))


class _Asker:
    """Of one place, with what it has to remember from question to question."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.remembered: dict[str, str] = {}
        # Not before it is needed: the trainer imports this module, too, and asks nobody.
        import urllib.request

        # A proxy that the environment names is not inside of the machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(
        self, path: str, headers: dict[str, str], *, method: str = "GET", seconds: float = _ANSWER_SECONDS
    ) -> tuple[int, str, Mapping[str, str]]:
        """(status, text, headers). OSError when there is nobody, or an error other than that there is no such thing."""
        import urllib.error
        import urllib.request

        request = urllib.request.Request(self.endpoint + path, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=seconds) as answer:
                text = answer.read(_LONGEST).decode("utf-8", "replace")
                return answer.status, text, dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (401, 404):
                    return error.code, "", {}
            raise


def _aws(asker: _Asker) -> Iterator[Event]:
    if "token" not in asker.remembered:
        life = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        status, asker.remembered["token"], _ = asker.ask("/latest/api/token", life, method="PUT")
        if status != 200:
            raise OSError(f"no token: {status}")
    header = {"X-aws-ec2-metadata-token": asker.remembered["token"]}
    status, text, _ = asker.ask("/latest/meta-data/spot/instance-action", header)
    if status == 401:
        del asker.remembered["token"]  # it has a life of six hours
        return
    if status == 200:
        action = json.loads(text)
        seconds = _seconds_until(datetime.fromisoformat(action["time"].replace("Z", "+00:00")))
        yield Event(f"action {action['time']}", f"AWS: spot instance, {action['action']}", seconds, True)
    status, text, _ = asker.ask("/latest/meta-data/events/recommendations/rebalance", header)
    if status == 200:
        yield Event(f"rebalance {text}", "AWS: rebalance recommendation", 2 * 60.0, False)


def _gcp_of(name: str) -> Callable[[_Asker], Iterator[Event]]:
    def place(asker: _Asker) -> Iterator[Event]:
        """Answers when it changes, or after a minute."""
        etag = asker.remembered.get("etag", "")
        wait = f"?wait_for_change=true&last_etag={etag}&timeout_sec={_GCP_WAIT_SECONDS}" if etag else ""
        status, text, headers = asker.ask(
            f"/computeMetadata/v1/instance/{name}{wait}",
            {"Metadata-Flavor": "Google"},
            seconds=_GCP_WAIT_SECONDS + _ANSWER_SECONDS,
        )
        asker.remembered["etag"] = next(
            (value for name, value in headers.items() if name.lower() == "etag"), ""
        )
        value = text.strip().upper()
        if status == 200 and value in ("TRUE", "TERMINATE_ON_HOST_MAINTENANCE"):
            yield Event(f"{name} {value}", f"GCP: {name} is {value}", _SHORTEST_SECONDS, True)

    return place


def _azure(asker: _Asker) -> Iterator[Event]:
    first = "name" not in asker.remembered
    if first:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        asker.remembered["name"] = asker.ask(path, {"Metadata": "true"})[1].strip()
    status, text, _ = asker.ask(
        "/metadata/scheduledevents?api-version=2020-07-01",
        {"Metadata": "true"},
        seconds=_FIRST_AZURE_SECONDS if first else _ANSWER_SECONDS,
    )
    if status != 200:
        return
    from email.utils import parsedate_to_datetime

    for event in json.loads(text)["Events"]:
        kind, name = event["EventType"], asker.remembered["name"]
        # Events of neighbours in a scale set are told as well.
        if kind in _AZURE_ENDS and (not name or name in event.get("Resources", [name])):
            before = event.get("NotBefore", "")
            seconds = _seconds_until(parsedate_to_datetime(before)) if before else _SHORTEST_SECONDS
            yield Event(event["EventId"], f"Azure: {kind}", seconds, True)


_PLACES: Final[dict[str, tuple[Callable[[_Asker], Iterator[Event]], ...]]] = {
    "aws": (_aws,),
    "gcp": (_gcp_of("preempted"), _gcp_of("maintenance-event")),
    "azure": (_azure,),
}


def _seconds_until(moment: datetime) -> float:
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return max(0.0, (moment - datetime.now(timezone.utc)).total_seconds())
