"""Process that delivers one message over the network: `python -m ciuic.daemon.base.notify_process`.

Standard input: one `NotifyJob` as JSON. It runs as a service of its own where the daemon has no network (`ciuic.daemon.base.alert_hook`).
Guarantees: URLs, which have passwords and tokens in them, are in no argument, no environment variable and nothing that is printed; a
place that failed is tried again after each of `pauses_seconds`, one that has the message is not; what a place answers is read as nobody,
who may read files and write none, with at most `_MAX_MEMORY_BYTES` (an answer may have any length). Exit status 0: all places have it.

References: healthchecks.io, "Pinging API" (`URL`, `URL/start`, `URL/fail`, the run id `rid`); apprise (Apprise.instantiate, notify).
"""

from __future__ import annotations

import logging
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Literal

import msgspec

from ciuic.structs import decode_json
from ciuic.system.privileges import limit_sender

EXIT_NOT_DELIVERED: Final = 1
EXIT_WITHOUT_APPRISE: Final = 3
_MAX_JOB_BYTES: Final = 1 << 20
_MAX_ANSWER_BYTES: Final = 1 << 16
_CALL_SECONDS: Final = 10.0
_MAX_MEMORY_BYTES: Final = 256 << 20


class NotifyJob(msgspec.Struct, kw_only=True, frozen=True):
    """A message and where it goes."""

    urls: tuple[str, ...] = ()
    """Places, as apprise takes them."""
    title: str = ""
    text: str = ""
    kind: Literal["failure", "warning", "success", "info"] = "info"
    ping: str = ""
    """URL that is called for a snapshot, with its state; empty for none."""
    state: Literal["start", "success", "fail"] = "success"
    snapshot: str = ""
    pauses_seconds: tuple[float, ...] = ()
    """Pauses before the second and each further try."""


class _NotDelivered(Exception):
    """The place did not take the message; the text says why, without its URL."""


def ping_url(url: str, state: str, snapshot: str) -> str:
    """Return the URL to call: the check's own for a success, with the state at the end of its path otherwise.

    The run id lets the service tell overlapping snapshots apart, and measure each.
    """
    parts = urllib.parse.urlsplit(url)
    suffix = "" if state == "success" else f"/{state}"
    run = uuid.uuid5(uuid.NAMESPACE_URL, f"ciuic:{snapshot}")
    query = "&".join(filter(None, (parts.query, f"rid={run}")))
    return urllib.parse.urlunsplit(parts._replace(path=parts.path.rstrip("/") + suffix, query=query))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuse: the address of the check is a secret, and only its own service hears it."""


def _ping(job: NotifyJob) -> None:
    url = ping_url(job.ping, job.state, job.snapshot)
    # A proxy is whatever the environment of the operator says.
    opener = urllib.request.build_opener(_NoRedirects)
    request = urllib.request.Request(url, data=job.text.encode("utf-8", "replace"), method="POST")
    try:
        with opener.open(request, timeout=_CALL_SECONDS) as answer:
            answer.read(_MAX_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        raise _NotDelivered(f"status {error.code}") from None
    # Of malformed answers as well.
    except Exception as error:
        reason = getattr(error, "reason", error)
        raise _NotDelivered(getattr(reason, "strerror", None) or type(reason).__name__) from None


def _notify(apprise: Any, job: NotifyJob, url: str) -> None:
    places, known, delivered = apprise.Apprise(), False, False
    # A plug-in may raise anything, with the URL in the text.
    with suppress(Exception):
        known = places.add(url)
        # As text: names that users chose are neither HTML in a mail nor links in a chat.
        delivered = known and bool(
            places.notify(
                body=job.text, title=job.title, notify_type=job.kind, body_format=apprise.NotifyFormat.TEXT
            )
        )
    if not known:
        raise _NotDelivered("apprise does not take this URL")
    if not delivered:
        raise _NotDelivered("apprise could not deliver")


def _with_pauses(calls: dict[str, Callable[[], None]], pauses_seconds: tuple[float, ...]) -> dict[str, str]:
    """Make all calls, those that fail once more after each pause, and return what failed last of each that never succeeded."""
    failed: dict[str, str] = dict.fromkeys(calls, "")
    for pause in (0.0, *pauses_seconds):
        time.sleep(pause)
        for name in list(failed):
            try:
                calls[name]()
            except _NotDelivered as error:
                failed[name] = str(error)
            else:
                del failed[name]
        if not failed:
            break
    return failed


def main() -> int:
    """Run the process and return its exit status."""
    # An alert goes out all the same where a filter of system calls, as that of a container, forbids part of it.
    with suppress(OSError):
        limit_sender(_MAX_MEMORY_BYTES)
    # Plug-ins write URLs into their warnings.
    logging.disable(logging.CRITICAL)
    try:
        job = decode_json(sys.stdin.buffer.read(_MAX_JOB_BYTES), NotifyJob)
    except msgspec.DecodeError:
        sys.stderr.write("notify: the job is none\n")
        return EXIT_NOT_DELIVERED
    calls: dict[str, Callable[[], None]] = {}
    if job.ping:
        calls["alert.ping"] = partial(_ping, job)
    if job.urls:
        try:
            import apprise
        except ImportError:
            sys.stderr.write("notify: apprise is not installed\n")
            return EXIT_WITHOUT_APPRISE
        for number, url in enumerate(job.urls):
            # The scheme tells mail from Slack, and is no secret.
            calls[f"alert.notify[{number}] ({url.partition('://')[0]})"] = partial(_notify, apprise, job, url)
    failed = _with_pauses(calls, job.pauses_seconds)
    for name, reason in failed.items():
        sys.stderr.write(f"notify: {name}: {reason}\n")
    return EXIT_NOT_DELIVERED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
