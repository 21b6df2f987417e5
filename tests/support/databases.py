"""Databases that commit numbered transactions, one process each, and the check of their restored directories.

    python -m support.databases KIND WRITE FOLDER COUNTS    COUNTS: a file of 16 bytes, see ``Counts``
    python -m support.databases KIND READ FOLDER            prints the first and the last number, and their count

Each transaction inserts its number; a directory that shows one moment of the database therefore opens, and
holds the numbers from 1 to the last without a gap. The caller checks which databases are installed
(``missing``).
"""

from __future__ import annotations

import atexit
import importlib.util
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

KINDS: Final = ("rocksdb", "lmdb", "sqlite", "postgresql")
_MODULES: Final = {"rocksdb": "rocksdict", "lmdb": "lmdb", "sqlite": "sqlite3"}
_MAP_BYTES: Final = 64 << 20
_FLUSH_EVERY: Final = 40
"""Transactions after which RocksDB writes a table file and names it in its MANIFEST."""
_PAUSE_SECONDS: Final = 0.001
_START_SECONDS: Final = 60
_POLL_SECONDS: Final = 0.1
_VALUE: Final = b"v" * 300
_PROGRAMS: Final = ("initdb", "postgres", "psql")
_SERVER: Final[dict[str, Any]] = {"user": 65534, "group": 65534, "extra_groups": []}
"""Account of the server: PostgreSQL does not run as root, and no user has this number."""


def missing(kind: str) -> str:
    """Return the missing parts of the database's software, or an empty text."""
    if kind == "postgresql":
        return "" if all(map(shutil.which, _PROGRAMS)) else f"{', '.join(_PROGRAMS)} are not all installed"
    module = _MODULES[kind]
    return "" if importlib.util.find_spec(module) is not None else f"{module} is not installed"


def wait_for_end_of_input(end: threading.Event) -> None:
    """Set the event when standard input ends."""
    sys.stdin.read()
    end.set()


def _end_server(server: subprocess.Popen[bytes], sockets: Path) -> None:
    """End a database server and remove its sockets."""
    server.send_signal(signal.SIGINT)
    server.wait()
    shutil.rmtree(sockets)


def _key(number: int) -> bytes:
    return b"%012d" % number


def _rocksdb(folder: Path) -> tuple[Callable[[int], None], Callable[[], Iterator[int]]]:
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    database: Any = rocksdict.Rdict(str(folder / "rocks"), options)
    durable = rocksdict.WriteOptions()
    durable.sync = True

    def commit(number: int) -> None:
        database.put(_key(number), _VALUE, write_opt=durable)
        if not number % _FLUSH_EVERY:
            database.flush()

    return commit, lambda: map(int, database.keys())


def _lmdb(folder: Path) -> tuple[Callable[[int], None], Callable[[], Iterator[int]]]:
    import lmdb

    (folder / "lm").mkdir(exist_ok=True)
    path = folder / "lm" / "data.mdb"
    # Opens the file first, as a reader does that was there before.
    reader = path.open("rb") if path.exists() else None
    environment: Any = lmdb.open(str(folder / "lm"), map_size=_MAP_BYTES, writemap=True)

    def commit(number: int) -> None:
        # Stays open as long as this function runs.
        assert reader is None or not reader.closed
        with environment.begin(write=True) as transaction:
            transaction.put(_key(number), _VALUE)

    def numbers() -> Iterator[int]:
        with environment.begin() as transaction:
            yield from (int(key) for key, _ in transaction.cursor())

    return commit, numbers


def _sqlite(folder: Path) -> tuple[Callable[[int], None], Callable[[], Iterator[int]]]:
    import sqlite3

    database = sqlite3.connect(folder / "numbers.sqlite", isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE IF NOT EXISTS numbers (number INTEGER PRIMARY KEY, value BLOB)")
    answer = database.execute("PRAGMA integrity_check").fetchone()
    assert answer == ("ok",), answer

    def commit(number: int) -> None:
        database.execute("INSERT INTO numbers VALUES (?, ?)", (number, _VALUE))

    return commit, lambda: (row[0] for row in database.execute("SELECT number FROM numbers ORDER BY number"))


def _postgresql(folder: Path) -> tuple[Callable[[int], None], Callable[[], Iterator[int]]]:
    data, sockets = folder / "pg", Path(tempfile.mkdtemp(prefix="pg-"))
    for place in (folder, sockets):
        os.chown(place, _SERVER["user"], _SERVER["group"])
    is_new = not data.exists()
    if is_new:
        quiet = subprocess.DEVNULL
        subprocess.run(["initdb", "-A", "trust", "-U", "pg", "-D", data], check=True, stdout=quiet, **_SERVER)
    # The file of a restored database names the server that runs on elsewhere.
    (data / "postmaster.pid").unlink(missing_ok=True)
    options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={sockets}"]
    server = subprocess.Popen(
        ["postgres", "-D", data, *options], cwd="/", stderr=subprocess.DEVNULL, **_SERVER
    )
    atexit.register(lambda: _end_server(server, sockets))
    ask = ["psql", "-qtAX", "-v", "ON_ERROR_STOP=1", "-h", str(sockets), "-U", "pg", "postgres"]
    ends = time.monotonic() + _START_SECONDS
    while subprocess.run([*ask, "-c", "SELECT 1"], capture_output=True, check=False).returncode:
        if server.poll() is not None or time.monotonic() > ends:
            raise RuntimeError("the server does not come up")
        time.sleep(_POLL_SECONDS)
    if is_new:
        table = "CREATE TABLE numbers (number bigint PRIMARY KEY, value text)"
        subprocess.run([*ask, "-c", table], check=True)
    client = subprocess.Popen(ask, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdin is not None
    answers = client.stdout
    assert answers is not None

    def send(statement: str) -> None:
        assert client.stdin is not None
        client.stdin.write(statement + ";\n")
        client.stdin.flush()

    def commit(number: int) -> None:
        send(f"INSERT INTO numbers VALUES ({number}, '{_VALUE.decode()}') RETURNING number")
        if int(answers.readline()) != number:
            raise RuntimeError("another number came back")

    def numbers() -> Iterator[int]:
        done = subprocess.run(
            [*ask, "-c", "SELECT number FROM numbers"], capture_output=True, text=True, check=True
        )
        return map(int, done.stdout.split())

    return commit, numbers


_OPEN: Final = {"rocksdb": _rocksdb, "lmdb": _lmdb, "sqlite": _sqlite, "postgresql": _postgresql}


class Counts:
    """Number of the transaction begun last, and of the last durable one; shared through a file."""

    _PAIR = struct.Struct("<QQ")

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._PAIR.size)

    @classmethod
    def make(cls, path: Path) -> Counts:
        path.write_bytes(bytes(cls._PAIR.size))
        return cls(path)

    def set(self, begun: int, durable: int) -> None:
        self._PAIR.pack_into(self._map, 0, begun, durable)

    @property
    def begun(self) -> int:
        return int(self._PAIR.unpack_from(self._map)[0])

    @property
    def durable(self) -> int:
        return int(self._PAIR.unpack_from(self._map)[1])


def _write(kind: str, folder: Path, counts: Counts) -> None:
    """Commit until standard input ends."""
    end = threading.Event()
    threading.Thread(target=wait_for_end_of_input, args=(end,), daemon=True).start()
    commit, numbers = _OPEN[kind](folder)
    number = max(numbers(), default=0)
    while not end.is_set():
        counts.set(number + 1, number)
        number += 1
        commit(number)
        counts.set(number, number)
        time.sleep(_PAUSE_SECONDS)


def _read(kind: str, folder: Path) -> None:
    found = list(_OPEN[kind](folder)[1]())
    sys.stdout.write(f"{min(found, default=0)} {max(found, default=0)} {len(found)}\n")


if __name__ == "__main__":
    if sys.argv[2] == "WRITE":
        _write(sys.argv[1], Path(sys.argv[3]), Counts(Path(sys.argv[4])))
    else:
        _read(sys.argv[1], Path(sys.argv[3]))
