"""Preemption notices of metadata services, with local servers in their place."""

from __future__ import annotations

import json
import queue
import time
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from support.metadata_service import Answer, service

from ciuic.system.cloud_notices import CloudNotice, MetadataService, watch

PATIENCE_SECONDS = 20.0


def _notices_of(cloud: str, answer: Answer, number: int = 1) -> list[CloudNotice]:
    notices: queue.Queue[CloudNotice] = queue.Queue()
    with service(answer) as address:
        watch([MetadataService(cloud, address, poll_seconds=0.01)], notices.put, lambda _: None)  # type: ignore[arg-type]
        return [notices.get(timeout=PATIENCE_SECONDS) for _ in range(number)]


def _seconds_from_now(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def test_an_aws_notice_is_reported_once_with_a_renewed_token() -> None:
    """AWS: an expired token is renewed, a notice is reported once, a rebalance recommendation is not certain."""
    tokens: list[str] = []
    when = _seconds_from_now(120).strftime("%Y-%m-%dT%H:%M:%SZ")

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        if path == "/latest/api/token":
            assert (method, headers["x-aws-ec2-metadata-token-ttl-seconds"]) == ("PUT", "21600")
            tokens.append(f"token-{len(tokens)}")
            return 200, tokens[-1], {}
        if headers.get("x-aws-ec2-metadata-token") != "token-1":
            return 401, "", {}
        if path == "/latest/meta-data/spot/instance-action":
            return 200, json.dumps({"action": "terminate", "time": when}), {}
        assert path == "/latest/meta-data/events/recommendations/rebalance"
        return 200, json.dumps({"noticeTime": when}), {}

    action, rebalance = _notices_of("aws", answer, 2)
    assert action.certain
    assert 100 < action.seconds <= 120
    assert "terminate" in action.text
    assert not rebalance.certain


def test_gcp_is_waited_for_until_it_changes() -> None:
    """GCP: requests wait for a change of the known etag."""
    paths: list[str] = []

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        assert headers["metadata-flavor"] == "Google"
        if "maintenance-event" in path:
            return 200, "NONE", {"ETag": "m"}
        paths.append(path)
        return 200, "TRUE" if "last_etag=first" in path else "FALSE", {"ETag": "first"}

    (event,) = _notices_of("gcp", answer)
    assert event.seconds == 30
    assert paths[0] == "/computeMetadata/v1/instance/preempted"
    assert paths[1].endswith("?wait_for_change=true&last_etag=first&timeout_sec=60")


def test_azure_events_of_other_machines_are_no_notices() -> None:
    """Azure: events of other machines and harmless events are no notices."""
    events = [
        {"EventId": "1", "EventType": "Preempt", "Resources": ["other"], "NotBefore": ""},
        {"EventId": "2", "EventType": "Freeze", "Resources": ["mine"], "NotBefore": ""},
        {
            "EventId": "3",
            "EventType": "Preempt",
            "Resources": ["mine"],
            "NotBefore": format_datetime(_seconds_from_now(60), usegmt=True),
        },
    ]

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        assert headers["metadata"] == "true"
        if path.startswith("/metadata/instance/compute/name"):
            return 200, "mine", {}
        assert path == "/metadata/scheduledevents?api-version=2020-07-01"
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": events}), {}

    (event,) = _notices_of("azure", answer)
    assert (event.key, event.text) == ("3", "Azure: Preempt")
    assert 40 < event.seconds <= 60


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_an_unusable_answer_is_reported_and_the_thread_goes_on(cloud: str) -> None:
    """An unusable answer is reported and does not end the thread."""
    messages: queue.Queue[str] = queue.Queue()

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        return 500 if cloud == "gcp" else 200, "[[", {}

    def reject(event: CloudNotice) -> None:
        raise AssertionError(event)

    with service(answer) as address:
        watch([MetadataService(cloud, address, 0.01)], reject, messages.put)  # type: ignore[arg-type]
        assert cloud in messages.get(timeout=PATIENCE_SECONDS)


def test_a_cloud_that_is_not_known_is_refused() -> None:
    """An unknown cloud is refused by its name."""
    with pytest.raises(ValueError, match="'ibm'"):
        MetadataService("ibm")  # type: ignore[arg-type]


def test_a_notice_that_is_taken_back_is_told_once() -> None:
    """An event that the service has no more is withdrawn, and may come again; a poll that says nothing withdraws nothing."""
    said: queue.Queue[str] = queue.Queue()
    polls = 0

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        nonlocal polls
        if path.startswith("/metadata/instance"):
            return 200, "mine", {}
        polls += 1
        there = polls in (1, 2, 4, 7)
        events = [{"EventId": "7", "EventType": "Reboot", "Resources": ["mine"]}] if there else []
        return 404 if polls == 3 else 200, json.dumps({"Events": events}), {}

    with service(answer) as address:
        watch(
            [MetadataService("azure", address, 0.01, grace_seconds=77)],
            lambda notice: said.put(f"notice {notice.seconds:.0f}"),
            said.put,
            withdraw=lambda notice: said.put(f"withdrawn {notice.key}"),
        )
        found = [said.get(timeout=PATIENCE_SECONDS) for _ in range(4)]
    assert found == ["notice 77", "withdrawn 7", "notice 77", "withdrawn 7"]


@pytest.mark.parametrize("way", ["redirect", "large", "many", "deep", "dead"])
def test_a_hostile_reply_is_no_notice(way: str) -> None:
    """Redirects are not followed, and replies beyond the limits count for nothing."""
    messages: queue.Queue[str] = queue.Queue()
    event = {"EventType": "Preempt", "Resources": ["mine"], "NotBefore": ""}
    event_of_all = json.dumps({"Events": [{**event, "EventId": "1"}]})

    def target(method: str, path: str, headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        return 200, event_of_all, {}

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        if path.startswith("/metadata/instance"):
            return 200, "mine", {}
        if way == "redirect":
            return 302, "", {"Location": f"{other}/metadata/scheduledevents"}
        if way == "large":
            return 200, event_of_all + " " * (10 << 20), {}
        if way == "many":
            return 200, json.dumps({"Events": [{**event, "EventId": str(one)} for one in range(1000)]}), {}
        if way == "deep":
            return 200, "[" * 500_000, {}
        return 200, "", {"Transfer-Encoding": "chunked"}

    def reject(notice: CloudNotice) -> None:
        messages.put(f"notice {notice}")

    with service(target) as other, service(answer) as address:
        watch([MetadataService("azure", address, 0.01)], reject, messages.put)
        assert "cannot be used" in messages.get(timeout=PATIENCE_SECONDS)
        time.sleep(0.2)
        assert messages.empty()
