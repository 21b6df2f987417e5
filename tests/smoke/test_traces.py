"""A trace of a real snapshot: daemon, upload and exporter as processes, and a receiver that decodes what arrives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.otlp import attributes, receiver
from support.site import CHECKOUT, Site, site_in
from support.until import until

from ciuic.protocol.control import ControlClient
from ciuic.repository import Repository


class TracedSite(Site):
    """Directory with a daemon whose snapshots are traced to `url`."""

    url = ""

    def write_config(self) -> None:
        super().write_config()
        with open(self.config, "a") as config:
            config.write(f'[exporter]\notlp = "{self.url}"\n')

    def command(self, *arguments: str) -> subprocess.Popen[bytes]:
        state = {"CIUIC_UPLOAD_STATE": f"{self.top}/upload", "XDG_STATE_HOME": f"{self.top}/state"}
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "ciuic", "--config", str(self.config), *arguments],
                env={**os.environ, **state, "PYTHONPATH": str(CHECKOUT)},
                cwd=self.top,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @contextmanager
    def exporting(self) -> Iterator[None]:
        process = self.command("exporter")
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, self.log.read_text()[-3000:]


def snapshot_of(client: ControlClient) -> str:
    state = client.take_snapshot(wait=True)
    assert state.state == "committed"
    return state.id


@pytest.mark.mount
def test_a_snapshot_is_one_span(short_tmp: Path) -> None:
    """A snapshot is sent once, from its cut to its end, with its figures, also if exporter and daemon are started anew."""
    with site_in(short_tmp) as plain, receiver() as server:
        site = TracedSite(plain.top)
        site.url = server.url
        root = site.root("a")
        (root / "file").write_bytes(b"x" * 5000)
        site.start()
        try:
            (root / "more").write_bytes(b"y" * 3000)
            taken = site.snapshot()
            with site.exporting():
                until("the span", lambda: server.of(taken))
            site.stop()
            site.start()
            last = site.snapshot()
            with site.exporting():
                until("the last span", lambda: server.of(last))
        finally:
            site.stop()
        (span,) = server.of(taken)
        with Repository.open(short_tmp / "repository") as repository:
            stored = repository.snapshots.load(repository.snapshots.resolve(taken))
            assert attributes(span)["ciuic.repository.id"] == repository.id
        assert span.end_time_unix_nano > span.start_time_unix_nano == stored.time_ns
        figures = attributes(span)
        assert figures["ciuic.snapshot.roots"] == [str(root)]
        assert figures["ciuic.snapshot.outcome"] == "committed"
        assert figures["ciuic.snapshot.files"] == stored.files
        assert figures["ciuic.capture.bytes_stored"] == stored.new_bytes
        assert figures["ciuic.capture.bytes_read"] >= 3000
        assert figures["ciuic.cut.hold_ms"] > 0
        sent = [one.span_id for one in server.spans]
        assert len(sent) == len(set(sent))


@pytest.mark.full
@pytest.mark.mount
def test_a_receiver_that_is_silent_costs_no_snapshot(short_tmp: Path) -> None:
    """While the receiver takes requests and does not answer, snapshots go on, the exporter ends at once, and the spans come later."""
    with site_in(short_tmp) as plain, receiver() as server:
        server.answers.clear()
        site = TracedSite(plain.top)
        site.url = server.url
        root = site.root("a")
        site.start()
        try:
            with site.exporting():
                taken = [site.snapshot()]
                assert server.asked.acquire(timeout=60)
                (root / "file").write_bytes(b"x")
                taken.append(site.snapshot())
            assert server.spans == []
            server.answers.set()
            with site.exporting():
                until("all spans", lambda: all(map(server.of, taken)))
        finally:
            site.stop()
