"""Process that asks metadata services for notices: `python -m ciuic.daemon.notice_process`.

Standard input: one `NoticeJob` as a line of JSON; at its end the process ends. Standard output: a `NoticeLine` as a line of JSON for each
notice, for each that is taken back, and for each trouble with a service. What a service replies is hostile and is decoded here
(`ciuic.system.cloud_notices`), without capabilities and with limits of memory and size, so that neither a reply nor a
service that hangs reaches the daemon.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec

from ciuic.structs import decode_json
from ciuic.system.cloud_notices import CloudNotice, MetadataService, watch

_MAX_MEMORY_BYTES: Final = 512 << 20


class NoticeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Services to ask."""

    services: tuple[MetadataService, ...]


class NoticeLine(msgspec.Struct, frozen=True, kw_only=True):
    """Statement of a metadata service about the end of this machine."""

    kind: Literal["notice", "withdrawn", "problem"]
    key: str = ""
    """Identity of the event."""
    text: str = ""
    seconds: float = 0.0
    """Time until the end."""
    certain: bool = True
    """False: the end has only become more likely."""


def main() -> int:
    """Run the process and return its exit status."""
    from ciuic.daemon.base.child_processes import JobInput
    from ciuic.system.privileges import limit_sender

    try:
        job = decode_json(JobInput(0).first_line(), NoticeJob)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        sys.stderr.write(f"notices: {error}\n")
        return 1
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    # A filter of system calls may forbid it, as that of a container.
    with suppress(OSError):
        limit_sender(_MAX_MEMORY_BYTES)
    lock = threading.Lock()

    def say(line: NoticeLine) -> None:
        with lock, suppress(OSError):
            sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
            sys.stdout.buffer.flush()

    def report(notice: CloudNotice) -> None:
        say(
            NoticeLine(
                kind="notice",
                key=notice.key,
                text=notice.text,
                seconds=notice.seconds,
                certain=notice.certain,
            )
        )

    watch(
        job.services,
        report,
        lambda text: say(NoticeLine(kind="problem", text=text)),
        withdraw=lambda notice: say(NoticeLine(kind="withdrawn", key=notice.key, text=notice.text)),
    )
    # Until the daemon ends or closes it: a daemon that is killed leaves nobody who asks.
    while os.read(0, 4096):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
