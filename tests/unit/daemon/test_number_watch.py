"""Numbers in files of trainings: JSON lines, TensorBoard events, files that grow and are replaced, and the alert."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import msgspec
import pytest
import trio

from ciuic.config import WatchNumber
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.trainers.loss_watch import NumberWatch
from ciuic.number_files import (
    MAX_READ_BYTES,
    NumberPlace,
    NumbersRead,
    json_lines,
    read_numbers,
    tensorboard_events,
)
from ciuic.verdicts.formats.tensor_bundle import crc32c, masked_crc32c


def field(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def event(tag: str, value: float, step: int, *, as_tensor: bool = False) -> bytes:
    """Return a record as TensorBoard's writers write it."""
    raw = struct.pack("<f", value)
    scalar = field(8, bytes([1 << 3, 1]) + field(4, raw)) if as_tensor else bytes([2 << 3 | 5]) + raw
    summary = field(1, field(1, tag.encode()) + scalar)
    message = bytes([1 << 3 | 1]) + struct.pack("<d", 1.0) + bytes([2 << 3, step]) + field(5, summary)
    return record(message)


def record(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    return (
        length
        + struct.pack("<I", masked_crc32c(length))
        + message
        + struct.pack("<I", masked_crc32c(message))
    )


def look(path: Path | str, before: NumbersRead | None = None, key: str = "loss") -> NumbersRead:
    place = NumberPlace(file=str(path), key=key)
    if before is not None:
        place = msgspec.structs.replace(place, path=before.path, inode=before.inode, offset=before.offset)
    return read_numbers(place)


def test_crc32c_is_the_one_of_rfc_3720() -> None:
    """The checksum of 32 zero bytes is that of RFC 3720, B.4."""
    assert crc32c(bytes(32)) == 0x8A9136AA


def test_lines_have_numbers_and_steps() -> None:
    """NaN, Infinity and whole numbers count; other lines, and a last one without an end, do not."""
    data = (
        b'{"loss": 1.5, "step": 3}\n{"loss": NaN, "step": 4}\n{"loss": -Infinity}\nnoise\n[1]\n{"loss": "x"}\n'
        b'{"loss": true}\n{"loss": 2, "step": -1}\n' + b"[" * 100_000 + b'\n{"loss": 9'
    )
    found = json_lines(data, "loss")
    assert repr(found.numbers) == "[(3, 1.5), (4, nan), (0, -inf), (0, 2.0)]"
    assert data[found.used :] == b'{"loss": 9'


def test_events_have_scalars() -> None:
    """Both forms of a scalar are read; other tags, tensors of several numbers and broken events are passed over."""
    several = field(8, bytes([1 << 3, 1]) + field(4, bytes(8)))
    data = (
        record(b"\x1a\x0dbrain.Event:2")
        + event("loss", 2.5, 7)
        + event("other", 3.5, 8)
        + event("loss", math.nan, 9, as_tensor=True)
        + record(field(5, field(1, field(1, b"loss") + several)))
        + record(b"\xff" * 20)
    )
    found = tensorboard_events(data + event("loss", 1.0, 10)[:-1], "loss")
    assert repr(found.numbers) == "[(7, 2.5), (9, nan)]"
    assert found.used == len(data)
    with pytest.raises(ValueError, match="checksum"):
        tensorboard_events(data + bytes(20), "loss")


def test_a_file_is_read_on_until_another_takes_its_place(tmp_path: Path) -> None:
    """Each number is read once; a file that was replaced or cut short is read from its beginning."""
    path = tmp_path / "m.jsonl"
    path.write_text('{"loss": 1}\n{"los')
    first = look(path)
    assert (first.numbers, first.has_more) == (((0, "1.0"),), False)
    with open(path, "a") as file:
        file.write('s": 2}\n')
    second = look(path, first)
    assert second.numbers == ((0, "2.0"),)
    assert look(path, second).numbers == ()
    path.write_text('{"loss": 3}\n')
    assert look(path, second).numbers == ((0, "3.0"),)
    assert look(tmp_path / "absent").problem == "No such file or directory"


def test_the_newest_file_of_a_pattern_is_read(tmp_path: Path) -> None:
    """A run that was started again writes another event file, which is read from its beginning."""
    old, new = tmp_path / "events.out.tfevents.1", tmp_path / "events.out.tfevents.2"
    old.write_bytes(event("loss", 1.0, 1))
    os.utime(old, (5, 5))
    pattern = tmp_path / "events.out.tfevents.*"
    first = look(pattern)
    assert (first.path, first.numbers) == (str(old), ((1, "1.0"),))
    new.write_bytes(event("loss", 2.0, 2))
    assert look(pattern, first).numbers == ((2, "2.0"),)


def test_large_and_strange_files_are_bounded(tmp_path: Path) -> None:
    """Of a large file of lines the end is read, a line without end is passed over, and neither link nor fifo is opened."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"loss": 1}\n' * (MAX_READ_BYTES // 6) + b'{"loss": 5}\n')
    found = look(path)
    assert (len(found.numbers), found.numbers[-1]) == (1000, (0, "5.0"))
    path.write_bytes(b"x" * (MAX_READ_BYTES + 5))
    assert look(path).offset == MAX_READ_BYTES + 5
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "fifo")
    assert look(tmp_path / "link").problem
    assert look(tmp_path / "fifo").problem == "it is no regular file"


@pytest.mark.parametrize("is_events", [False, True])
def test_a_number_that_is_none_is_an_alert(tmp_path: Path, is_events: bool) -> None:
    """The limited process reads both formats; the alert names the snapshot before, and ends with its table or with order."""
    path = tmp_path / ("events.out.tfevents.7" if is_events else "m.jsonl")
    number = WatchNumber(str(path))
    settings = Settings(socket=tmp_path / "s", runtime_dir=tmp_path, repository=None, watch_numbers=(number,))
    holder = [settings]
    alerts = Alerts(EventBus(lambda: 0), lambda: 0)
    asked: list[tuple[int, str]] = []

    def newest(before_ns: int, file: str) -> str:
        asked.append((before_ns, file))
        return "cs-abcdef"

    watch = NumberWatch(lambda: holder[0], alerts, cwd=tmp_path, newest_snapshot=newest)

    def after(*losses: float) -> list[str]:
        with open(path, "ab") as file:
            for loss in losses:
                line = json.dumps({"loss": loss, "step": 9}).encode() + b"\n"
                file.write(event("loss", loss, 9) if is_events else line)
        trio.run(watch.once)
        return [alert.message for alert in alerts.standing()]

    assert after(*[2.0, 2.25] * 20) == []
    assert after(9.0) == [f"loss of {path} spiked to 9 at step 9; it was 2.125"]
    assert after(math.nan) == [f"loss of {path} is no finite number at step 9; it was 2.25"]
    (alert,) = alerts.standing()
    assert (alert.key, alert.severity) == (f"number:{path}:loss", "problem")
    assert "cs-abcdef" in alert.hint
    # From before the look before, which is later each time.
    assert [file for _, file in asked] == [str(path)] * 2
    assert 0 < asked[0][0] < asked[1][0]
    assert after(*[2.0] * 10) == []
    assert len(after(math.inf)) == 1
    holder[0] = settings._replace(watch_numbers=())
    assert after() == []
    # What was there before the first look may be in every snapshot; so may be that of another file in its place.
    holder[0] = settings
    count = len(asked)
    assert len(after()) == 1
    (tmp_path / "new").write_bytes(path.read_bytes())
    assert after(*[2.0] * 10) == []
    (tmp_path / "new").rename(path)
    for losses in ([], [2.0] * 10):
        after(*losses)
        assert all("ciuic list" in alert.hint for alert in alerts.standing())
    assert len(asked) == count


def test_of_a_large_event_file_the_end_was_not_seen(tmp_path: Path) -> None:
    """A look that ends before the end of the file says nothing of when the rest was written."""
    path = tmp_path / "events.out.tfevents.1"
    one = event("loss", 1.0, 1)
    path.write_bytes(one * (MAX_READ_BYTES // len(one) + 5))
    first = look(path)
    assert first.has_more
    assert not look(path, first).has_more
