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

    def run(self, *arguments: str) -> None:
        assert self.command(*arguments).wait(120) == 0, self.log.read_text()[-3000:]

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
def test_a_snapshot_is_one_trace(short_tmp: Path) -> None:
    """Cut, capture, commit and a later upload are one trace: nested, with the right parents, though no process spoke to another."""
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
                until(
                    "the daemon's spans", lambda: server.named(taken).keys() >= {"cut", "capture", "commit"}
                )
            # Another process, which begins when the daemon and an exporter have ended.
            site.stop()
            site.run("remote", "init", f"file://{short_tmp}/nas", "--no-encryption", "-y")
            site.run("remote", "upload", "--once")
            with site.exporting():
                until("the upload's span", lambda: "upload" in server.named(taken))
        finally:
            if site.process is not None:
                site.stop()
        spans = server.named(taken)
        cut, capture, commit, upload = (spans[name] for name in ("cut", "capture", "commit", "upload"))
        assert len({one.trace_id for one in spans.values()}) == 1
        assert (cut.parent_span_id, capture.parent_span_id) == (b"", cut.span_id)
        assert (commit.parent_span_id, upload.parent_span_id) == (capture.span_id, cut.span_id)
        times = [
            *(cut.start_time_unix_nano, cut.end_time_unix_nano),
            *(capture.start_time_unix_nano, commit.start_time_unix_nano),
        ]
        assert times == sorted(times)
        assert commit.end_time_unix_nano == capture.end_time_unix_nano > commit.start_time_unix_nano
        assert capture.end_time_unix_nano <= upload.start_time_unix_nano < upload.end_time_unix_nano
        with Repository.open(short_tmp / "repository") as repository:
            stored = repository.snapshots.load(repository.snapshots.resolve(taken))
            assert attributes(cut)["ciuic.repository.id"] == repository.id
        assert cut.start_time_unix_nano == stored.time_ns
        assert attributes(cut)["ciuic.snapshot.roots"] == [str(root)]
        assert attributes(cut)["ciuic.cut.hold_ms"] * 1e6 == cut.end_time_unix_nano - cut.start_time_unix_nano
        figures = attributes(capture)
        assert figures["ciuic.snapshot.outcome"] == "committed"
        assert figures["ciuic.snapshot.files"] == stored.files
        assert figures["ciuic.capture.bytes_stored"] == stored.new_bytes
        assert figures["ciuic.capture.bytes_read"] >= 3000
        assert attributes(upload)["ciuic.remote.name"] == "remote"
        # Of which snapshot the blocks went first is the uploader's choice.
        assert sum(attributes(one).get("ciuic.upload.bytes_sent", 0) for one in server.spans) > 0
        # Each was sent once, though exporter and daemon were started anew.
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
                until("all spans", lambda: all(len(server.named(one)) == 3 for one in taken))
        finally:
            site.stop()
