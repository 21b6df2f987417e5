"""Tests of the daemon's control of background work: terms, priority and weight of the slice, which is used only where it was seen to work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from support.fake_daemon import Bench, FakeOverlay, sleeping_process
from support.until import until_async

from ciuic.daemon.base.process_priority import (
    SLICE,
    PriorityControl,
    RunningProcess,
    SliceWeight,
    slice_prefix,
)
from ciuic.protocol.control_types import SnapshotRequest
from ciuic.system.urgency import Urgency


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = sleeping_process()
    yield process
    process.kill()
    process.wait()


class Source:
    """A source of work that runs or does not."""

    def __init__(self) -> None:
        self.running: RunningProcess | None = None
        self.sent: list[Urgency] = []
        self.takes = True

    def send(self, urgency: Urgency) -> bool:
        if self.takes:
            self.sent.append(urgency)
        return self.takes

    def __call__(self) -> RunningProcess | None:
        return self.running


def test_terms_are_sent_once_and_again_when_they_change(child: subprocess.Popen[bytes]) -> None:
    """Terms are sent once and again when they change; passing time is no change, as the process counts it."""
    source = Source()
    urging = PriorityControl([source, lambda: None], lambda: "idle")
    assert urging.once() == 0
    for terms in (
        Urgency(min_share=0.01, finish_within_seconds=300),
        Urgency(min_share=0.01, finish_within_seconds=300, elapsed_seconds=7),
        Urgency(min_share=0.01, finish_within_seconds=300, elapsed_seconds=8, requested=True),
        Urgency(min_share=0.02, finish_within_seconds=300, elapsed_seconds=9, requested=True),
    ):
        source.running = RunningProcess(child.pid, terms, source.send)
        assert urging.once() == terms.least_share(0)
    assert [(one.min_share, one.elapsed_seconds, one.requested) for one in source.sent] == [
        (0.01, 0, False), (0.01, 8, True), (0.02, 9, True),
    ]  # fmt: skip


def test_terms_that_could_not_be_sent_are_sent_later(child: subprocess.Popen[bytes]) -> None:
    """Terms that could not be sent are sent later, as a process without its job would take them for it."""
    source = Source()
    urging = PriorityControl([source], lambda: "none")
    source.running = RunningProcess(child.pid, Urgency(requested=True), source.send)
    for source.takes in (False, True, True):
        urging.once()
    assert source.sent == [Urgency(requested=True)]


def test_a_process_is_put_in_its_place_from_outside(child: subprocess.Popen[bytes]) -> None:
    """A process is given its priority from outside, as one that gets no processor cannot do it."""
    source = Source()
    urging = PriorityControl([source], lambda: "idle")
    source.running = RunningProcess(child.pid, Urgency(min_share=0.1), source.send)
    urging.once()
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == 10


def test_waiting_request_speeds_up_a_scheduled_capture(tmp_path: Path) -> None:
    """A scheduled capture gets half of the time as soon as a requested snapshot waits behind it."""
    bench = Bench(tmp_path)
    gate = trio.Event()
    bench.gates = [None, gate]
    bench.add_root("/a", FakeOverlay())
    woken: list[bool] = []
    bench.on_urgency = lambda: woken.append(bench.snapshots.caller_waits)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.snapshots.capturing.run)
            with trio.fail_after(30):
                first = await bench.snapshots.take(SnapshotRequest(), scheduled=True)
                # The first snapshot of a root counts as requested.
                assert first.record.requested
                await first.finished.wait()
                await bench.snapshots.take(SnapshotRequest(), scheduled=True)
                await until_async(lambda: len(bench.jobs) == 2)
                running = bench.snapshots.capturing.running()
                assert running is not None
                assert not running.urgency.requested
                assert not woken[-1]
                await bench.snapshots.take(SnapshotRequest())
                running = bench.snapshots.capturing.running()
                assert running is not None
                assert running.urgency.requested
                assert woken[-1]
                gate.set()
            nursery.cancel_scope.cancel()

    try:
        trio.run(main)
    finally:
        bench.close()
    assert [job.urgency.requested for job in bench.jobs[:2]] == [True, False]


def test_the_slice_has_the_weight_of_the_share(tmp_path: Path) -> None:
    """The slice's weight follows the share in steps of two, and is the least weight again at the end.

    A nice value counts within the slice alone. Each change costs a process, hence the steps.
    """
    output = tmp_path / "said"
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f'#!/bin/sh\necho "$@" >> {output}\n')
    systemctl.chmod(0o755)

    async def main() -> None:
        weight = SliceWeight(systemctl=str(systemctl))
        for share in (0.0, 0.01, 0.012, 0.3, 0.31, 1.0, 0.0):
            await weight.set(share)

    trio.run(main)
    assert output.read_text().splitlines() == [
        f"set-property --runtime {SLICE} CPUWeight={weight} IOWeight={weight}"
        for weight in (1, 2, 32, 100, 1)
    ]


@pytest.mark.parametrize("systemctl", ["/nonexistent/systemctl", "/bin/false", sys.executable])
def test_a_weight_that_cannot_be_set_is_no_error(systemctl: str) -> None:
    """The capture goes on without systemd, or when it refuses the weight."""
    trio.run(SliceWeight(systemctl=systemctl).set, 0.5)


UNDER_SYSTEMD = {"INVOCATION_ID": "x"}


def program(directory: Path, text: str) -> str:
    path = directory / "systemd-run"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_program_that_becomes_the_command_is_used(tmp_path: Path) -> None:
    """A program that execs the command, with the same process and descriptors, is used with the slice."""
    run = program(tmp_path, 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"')
    prefix = slice_prefix(UNDER_SYSTEMD, systemd_run=run)
    assert prefix[0] == run
    assert f"--slice={SLICE}" in prefix


@pytest.mark.parametrize(
    "text",
    [
        "exit 1",
        # The command is a child of its own, which a kill would miss.
        'while [ "$1" != -- ]; do shift; done; shift; "$@"; true',
        # The program closes descriptors.
        'while [ "$1" != -- ]; do shift; done; shift; for f in /proc/self/fd/*; do n=${f##*/}; '
        '[ $n -gt 2 ] && eval "exec $n>&-"; done; exec "$@"',
    ],
)
def test_unsuitable_programs_are_not_used(tmp_path: Path, text: str) -> None:
    """A program that refuses, forks or closes the descriptors is not used, and captures run without slice."""
    assert slice_prefix(UNDER_SYSTEMD, systemd_run=program(tmp_path, text)) == ()


def test_a_missing_program_is_no_error(tmp_path: Path) -> None:
    """The command has no prefix without systemd-run."""
    assert slice_prefix(UNDER_SYSTEMD, systemd_run=str(tmp_path / "none")) == ()


def test_outside_systemd_nothing_is_tried(tmp_path: Path) -> None:
    """Captures in a terminal or container start without a slice, and nothing is tried."""
    run = program(tmp_path, f"touch {tmp_path}/ran")
    assert slice_prefix({}, systemd_run=run) == ()
    assert not (tmp_path / "ran").exists()
