"""Communication between the ranks that train one model (DDP): process groups, agreement, and messages without pickle.

Rank 0 saves; the others send it what differs from rank to rank (`rank_state`), and all agree on the step.
They use gloo process groups of their own with their own timeouts: a save that takes long trips no timeout of
the training, and nothing of it is on the training's streams. Every rank creates the manager and registers the
same objects.

Who has come, where ranks must not wait for others that may never come, is told in the store with which
torch.distributed was initialized. It is the job's own, and torch closes the connection of a rank that puts 8 MiB in it:
keys have a few bytes, and only those of the last `_KEPT_EVENTS` events stay. When the program asks for a snapshot,
perhaps on rank 0 alone, a rank leaves its own state in a file of the directory that it shares with rank 0. One on
another host, or whose state is too large to be left unasked, stays for a moment to see whether rank 0 takes it.

A message is JSON and the bytes of tensors in a msgpack document. Any process that reaches the port of torch's store,
or a connection between two ranks, can send anything. Guarantees: decoding executes nothing and creates only the kinds
of values in `format.structure`; anything else is a ValueError. What `encode` accepts comes back equal, on the host,
with tensors that share no memory with the original.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from ciuic.structs import decode_msgpack
from ciuic.system.disk import open_regular
from ciuic.system.poll import wait_until
from ciuic.system.processes import boot_id
from ciuic.training.format import structure, tensors
from ciuic.training.format.tensors import Array, ArrayBuffer
from ciuic.training.logs import log

MAX_MESSAGE_BYTES: Final = 4 << 30
"""Largest message that is received.

A rank's own state is megabytes: a larger length is an error or an attack, and is not allocated.
"""


class _Tensor(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    """Name of the dtype in safetensors."""
    shape: list[int]
    data: bytes


class _Message(msgspec.Struct, array_like=True):
    skeleton: bytes
    """JSON, because integers of msgpack end at 64 bits."""
    tensors: list[_Tensor]


def encode(value: object) -> bytes:
    """Return the message for a value.

    Raises:
        Unsaveable: structure.py does not store the value (a TypeError).
    """
    packed = structure.pack(value, "a message to other ranks")
    found = []
    for leaf in packed.leaves:
        # A copy on the host: the message must not change while the training goes on.
        room = bytearray(leaf.array.size_bytes)
        if room:
            ArrayBuffer(memoryview(room), leaf.array).fill(leaf.value)
        found.append(_Tensor(leaf.name, leaf.array.dtype, list(leaf.array.shape), bytes(room)))
    skeleton = json.dumps(packed.skeleton, separators=(",", ":")).encode("ascii")
    return msgspec.msgpack.encode(_Message(skeleton, found))


def decode(data: bytes | bytearray) -> Any:
    """Return the value of a message.

    Raises:
        ValueError: `encode` did not write the message.
    """
    try:
        message = decode_msgpack(data, _Message)
        made = _Made(message.tensors)
        # Tensors that are created in torch's inference mode cannot be changed by the training later.
        with tensors.outside_inference_mode():
            return structure.unpack(json.loads(message.skeleton), made.tensor)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"a message of another rank is malformed: {error}") from None
    except (RuntimeError, OverflowError, TypeError, AttributeError, MemoryError, LookupError) as error:
        # torch and NumPy raise these for shapes and dtypes that do not fit the content, or do not exist.
        raise ValueError(f"a message of another rank has a value that cannot be made: {error}") from None


class _Made:
    """Tensors of one message, each created once, so that tied tensors stay tied."""

    def __init__(self, found: list[_Tensor]) -> None:
        self._found = {one.name: one for one in found}
        self._made: dict[str, Any] = {}

    def tensor(self, name: str, packed: dict[str, Any]) -> Any:
        # A rank sends what it has itself, of which nothing is in pieces.
        if packed[structure.KIND] != "tensor":
            raise ValueError("a message of another rank has a tensor that is in pieces")
        if name not in self._made:
            self._made[name] = _make(self._found[name], packed)
        return self._made[name]


def _make(found: _Tensor, packed: dict[str, Any]) -> Any:
    size_bytes = prod(found.shape) * tensors.dtype_bytes(found.dtype)
    # Two negative sizes have a positive product.
    if size_bytes != len(found.data) or any(size < 0 for size in found.shape):
        raise ValueError(f"the tensor {found.name!r} has {len(found.data)} bytes, expected {size_bytes}")
    owner, room = tensors.empty_buffer(size_bytes)
    room[:] = found.data
    framework: tensors.Framework = "numpy" if packed.get("of") == "numpy" else "torch"
    true_shape = tuple(packed.get("shape", ()))
    array = Array(
        framework, found.dtype, tuple(found.shape), size_bytes, str(packed.get("dtype", "")), true_shape
    )
    return tensors.from_buffer(owner, 0, array)


# --- over process groups of torch.distributed


def gather(mine: bytes, group: Any) -> list[bytearray] | None:
    """Return the bytes of every rank, on rank 0 of ``group``; None on the others.

    Raises:
        RuntimeError: A rank is gone, or a length is impossible.
    """
    import torch.distributed as dist

    sizes, sent, rooms = _prepare(mine, group)
    is_first = dist.get_rank(group) == 0
    views = [_as_tensor(room, group) for room in rooms] if is_first else None
    # `group_dst` (torch 2.6): rank 0 of the group, which need not be rank 0 of the program.
    dist.gather(sent, views, group=group, group_dst=0)
    return _without_padding(rooms, views, sizes) if views is not None else None


def all_gather(mine: bytes, group: Any) -> list[bytearray]:
    """Return the bytes of every rank, on every rank of ``group``.

    Raises:
        RuntimeError: A rank is gone, or a length is impossible.
    """
    import torch.distributed as dist

    sizes, sent, rooms = _prepare(mine, group)
    views = [_as_tensor(room, group) for room in rooms]
    dist.all_gather(views, sent, group=group)
    return _without_padding(rooms, views, sizes)


def broadcast(mine: bytes | bytearray | None, group: Any, source: int = 0) -> bytearray:
    """Return the bytes of one rank of ``group``, on every rank.

    Args:
        mine: The bytes on that rank, None on the others.
        group: Process group.
        source: The rank, as the group counts.

    Raises:
        RuntimeError: A rank is gone, or a length is impossible.
    """
    import torch
    import torch.distributed as dist

    # The length first, because the receivers have to give a tensor of the right size.
    size = torch.tensor([0 if mine is None else len(mine)], dtype=torch.int64, device=_device(group))
    dist.broadcast(size, group=group, group_src=source)
    # Checked before it is allocated: the length came from another process.
    room = bytearray(_checked(int(size.item())))
    if mine is not None:
        room[:] = mine
    view = _as_tensor(room, group)
    dist.broadcast(view, group=group, group_src=source)
    return _without_padding([room], [view], [len(room)])[0]


def send(mine: bytes, group: Any, to: int) -> None:
    """Send bytes to one rank of ``group``, which calls `receive`.

    Raises:
        RuntimeError: The rank is gone.
    """
    import torch
    import torch.distributed as dist

    dist.send(torch.tensor([len(mine)], dtype=torch.int64), group=group, group_dst=to)
    dist.send(torch.frombuffer(bytearray(mine), dtype=torch.uint8), group=group, group_dst=to)


def receive(group: Any, source: int) -> bytearray:
    """Return the bytes that one rank of ``group`` sends.

    Raises:
        RuntimeError: The rank is gone, or the length is impossible.
    """
    import torch
    import torch.distributed as dist

    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, group=group, group_src=source)
    room = bytearray(_checked(int(size.item())))
    dist.recv(torch.frombuffer(room, dtype=torch.uint8), group=group, group_src=source)
    return room


def _prepare(mine: bytes, group: Any) -> tuple[list[int], Any, list[bytearray]]:
    """Return the sizes of all messages, this rank's padded bytes, and a buffer for each rank."""
    import torch
    import torch.distributed as dist

    device, number = _device(group), dist.get_world_size(group)
    found = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(number)]
    dist.all_gather(found, torch.tensor([len(mine)], dtype=torch.int64, device=device), group=group)
    sizes = [_checked(int(size.item())) for size in found]
    longest = max(sizes)
    room = bytearray(mine)
    # Collectives take tensors of one size only.
    room.extend(bytes(longest - len(mine)))
    return sizes, _as_tensor(room, group), [bytearray(longest) for _ in range(number)]


def _checked(size_bytes: int) -> int:
    if not 0 < size_bytes <= MAX_MESSAGE_BYTES:
        raise RuntimeError(
            f"a message between ranks must have 1 to {MAX_MESSAGE_BYTES} bytes, got {size_bytes}"
        )
    return size_bytes


def _as_tensor(room: bytearray, group: Any) -> Any:
    """Return the bytes as a tensor: the same memory on the host, a copy on a device."""
    import torch

    return torch.frombuffer(room, dtype=torch.uint8).to(_device(group))


def _without_padding(rooms: list[bytearray], views: list[Any], sizes: list[int]) -> list[bytearray]:
    """Return the messages without their padding. Consumes ``views``."""
    import torch

    for room, view in zip(rooms, views, strict=True):
        if view.device.type != "cpu":
            torch.frombuffer(room, dtype=torch.uint8).copy_(view)
    views.clear()
    found = []
    for room, size in zip(rooms, sizes, strict=True):
        found.append(room if len(room) == size else room[:size])
    return found


def _device(group: Any) -> str:
    """Return the device on which the backend of ``group`` takes tensors."""
    import torch.distributed as dist

    backends = str(dist.get_backend(group))
    # A group with several backends ("cpu:gloo,cuda:nccl") can do the host, which needs no copy.
    if "gloo" in backends or "mpi" in backends:
        return "cpu"
    # These backends take tensors on their devices alone.
    for name, device in (("nccl", "cuda"), ("xccl", "xpu")):
        kind = getattr(sys.modules["torch"], device, None)
        if name in backends and kind is not None:
            with suppress(RuntimeError):
                return f"{device}:{kind.current_device()}"
    return "cpu"


# Time for all ranks to create their managers.
_MEET_SECONDS: Final = 10.0
# Time after which a rank logs for what it waits.
_LOG_WAIT_SECONDS: Final = 2.0
# Time for all ranks to come to their first boundary; training itself keeps them within a step of each other.
_BOUNDARY_SECONDS: Final = 30.0
# Time for the other ranks to be asked for a snapshot too.
_COME_SECONDS: Final = 5.0
# Timeout of one save's messages: shorter than the timeout that training has for its own.
_GATHER_SECONDS: Final = 300.0
# Timeout of messages for which ranks wait as long as it takes: votes, and what rank 0 finds to load.
_PATIENT_SECONDS: Final = 86400.0
_POLL_SECONDS: Final = 0.02
_CALL: Final = "call"
# What a rank that stays says in its key, what rank 0 then sets, and what the rank sets if that does not come.
_STAYS: Final = b"stays"
_TAKEN: Final = b"taken"
_LEFT: Final = b"left"
_IN_FILE: Final = b"file"
_FAILED: Final = b"failed: "
_MAX_PROBLEM_BYTES: Final = 256
# Events of which the keys of this process stay in the job's store: others may still look for them.
_KEPT_EVENTS: Final = 16
# Files of a rank that rank 0 has not taken: it may be some calls behind.
_KEPT_FILES: Final = 4
_keys_set: deque[tuple[str, tuple[str, ...]]] = deque()
"""Prefix and names of the keys that this process has set in the job's store at each event, across managers."""
_managers_made: dict[str, int] = {}
"""Number of managers that this process has created, by name.

All ranks count alike, so the number names the same manager on each.
"""


class Directories(NamedTuple):
    """Which ranks save in the same directory: those of one host, or all of them where hosts share a file system."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks of each directory, in order of their first ranks."""
    names: tuple[str, ...]
    """Name of each directory in a set, unique."""

    @classmethod
    def one(cls, ranks: Iterable[int]) -> Directories:
        """Return the single directory of all ranks."""
        return cls((tuple(ranks),), ("all",))

    def number_of(self, rank: int) -> int:
        """Return the place in `groups` of the directory of a rank."""
        return next(number for number, group in enumerate(self.groups) if rank in group)


class RankMismatch(Exception):
    """Error: the other ranks did not come, or are gone."""


class PartLost(RankMismatch):
    """Error: all ranks were asked for their own states, and rank 0 cannot have that of one."""


class Ranks:
    """All ranks as seen by one of them. One thread at a time."""

    def __init__(self, rank: int, world_size: int, quick: Any, patient: Any, prefix: str) -> None:
        """Use two process groups that exist already.

        Args:
            rank: This rank.
            world_size: Number of ranks.
            quick: Group with the timeout of one save.
            patient: Group whose messages may take long.
            prefix: Prefix of keys in the store.
        """
        self.rank = rank
        self.world_size = world_size
        self.directories = Directories.one(range(world_size))
        self._quick, self._patient = quick, patient
        self._prefix = prefix
        self.directory = Path()
        """Repository in which this rank saves."""
        self.talks_to: list[int] = []
        """Ranks that stay: for rank 0 those whose state it has taken so, for them rank 0."""
        self._left_files: deque[Path] = deque()
        self._solo_call_sites: set[str] = set()
        """Call sites of save_snapshot that are reached on rank 0 alone."""
        self._asked: dict[str, tuple[int, int]] = {}
        """Step of the last call and number of calls at that step, by call site."""
        self._call = "", 0, 0
        """Current call site with its step and number; the same on all ranks that are in the same call."""

    @classmethod
    def meet(cls, name: str) -> Ranks | None:
        """Meet the other ranks. Collective, and before anything that may take long on one rank alone, because they wait for a limited time.

        `find_directories` or `leave` must follow.

        Args:
            name: Name of the manager.

        Returns:
            None if this process trains alone, or if the others create no manager, which is logged.
        """
        torch = sys.modules.get("torch")
        dist = getattr(torch, "distributed", None)
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return None
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1:
            return None
        # Keys in the store must differ between managers: a key of an earlier one would answer for the later.
        number = _managers_made[name] = _managers_made.get(name, 0) + 1
        store = dist.PrefixStore(f"ciuic/{name}/{number}", dist.distributed_c10d._get_default_store())
        meeting = _meet(store, rank, world_size, _MEET_SECONDS)
        if not meeting:
            _log_alone(rank)
            return None
        # Groups of our own: a save that takes long trips no timeout of the training. On gloo: nothing is
        # queued on the training's streams.
        own = (f"here-{rank}",) if rank else (_CALL, *(f"all-{one}" for one in range(1, world_size)))
        _keys_set.append((f"ciuic/{name}/{number}", own))
        quick = dist.new_group(backend="gloo", timeout=timedelta(seconds=_GATHER_SECONDS))
        patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=_PATIENT_SECONDS))
        return cls(rank, world_size, quick, patient, f"ciuic/{name}/{meeting}")

    def find_directories(self, directory: Path) -> bool:
        """Find out which ranks save in the same directory. Collective.

        Args:
            directory: Repository in which this rank saves, which exists.

        Returns:
            False if a rank has left, which is logged: the others are on their own.

        Raises:
            RankMismatch: A rank is gone.
        """
        found = _find_directories(self, directory)
        if found is None:
            _log_alone(self.rank)
            return False
        self.directories, self.directory = found, directory
        if len(found.groups) > 1:
            log.info("ciuic: the ranks save in %d directories", len(found.groups))
        return True

    def leave(self) -> None:
        """Tell the ranks, which are or will be in `find_directories`, that this one makes no manager."""
        with suppress(RankMismatch):
            self.exchange(None)

    @property
    def saves(self) -> bool:
        """True if this rank writes the snapshots of what all ranks have alike."""
        return self.rank == 0

    @property
    def shared_by(self) -> tuple[int, ...]:
        """Ranks that save in the directory of this one."""
        return self.directories.groups[self.directories.number_of(self.rank)]

    @property
    def leads_directory(self) -> bool:
        """True if this rank is the first that saves in its directory."""
        return self.rank == self.shared_by[0]

    def all_at_boundary(self) -> bool:
        """Return whether all ranks come to a boundary; the same answer on every rank that asks.

        This is asked once, before anything is agreed at boundaries.

        Raises:
            RankMismatch: The store is gone.
        """
        seconds = _COME_SECONDS if self._solo_call_sites else _BOUNDARY_SECONDS
        return self._all_arrive("boundary", seconds, "come to a boundary of two steps")

    def all_closing(self) -> bool:
        """Return whether all ranks close their managers, waiting a moment for them; the same on every rank.

        Raises:
            RankMismatch: The store is gone.
        """
        return self._all_arrive("closing", _COME_SECONDS, "close the manager")

    def begin_asked(self, step: int, call_site: str) -> None:
        """Record that the program asks for a snapshot; call it before `all_asked`, `hand_in` and `durable`.

        Args:
            step: Step of the run.
            call_site: Place of the call in the program.
        """
        before, number = self._asked.get(call_site, (step, 0))
        self._asked[call_site] = step, number + 1 if before == step else 1
        self._call = call_site, *self._asked[call_site]

    def all_asked(self) -> bool:
        """Return whether the program asks for the snapshot on all ranks.

        Every rank that was asked gets the same answer.

        Raises:
            RankMismatch: The store is gone.
        """
        return self._all_arrive(f"asked/{self._call}", _COME_SECONDS, "call save_snapshot")

    def hand_in(self, mine: Any, *, stays: bool = False) -> list[Any] | None:
        """Hand each rank's own state to rank 0.

        Rank 0 waits for the others once for each call site. The others do not wait, except for those that stay: a
        moment for rank 0 to come.

        Args:
            mine: State of this rank.
            stays: This rank has more to tell once rank 0 has its state; a rank on another host stays in any case.

        Returns:
            On rank 0 the states by rank, or None if the others were not asked; [] on the others.
            `talks_to` names the ranks that stay: each now waits for one `send` of rank 0, also if this raises.

        Raises:
            PartLost: All were asked, and rank 0 cannot have the state of one, or not decode it.
            RankMismatch: The store is gone.
        """
        with _errors_as_ranks_apart():
            store = self._open_keys(f"own/{self._call}", "none" if self.saves else str(self.rank))
            self.talks_to = []
            if not self.saves:
                if stays or 0 not in self.shared_by:
                    self._stay(store, encode(mine))
                    return []
                store.set(str(self.rank), self._leave_file(encode(mine)))
                return []
            call_site, others = self._call[0], range(1, self.world_size)
            names = [str(rank) for rank in others]
            # Each call site counts for itself: most programs save on rank 0 alone, and pay these
            # seconds once.
            seconds = 0.0 if call_site in self._solo_call_sites else _COME_SECONDS
            if not wait_until(lambda: store.check(names), seconds, _POLL_SECONDS):
                if call_site not in self._solo_call_sites:
                    log.warning(
                        "ciuic: save_snapshot is called on rank 0 alone at %s: the snapshot lacks generators and positions "
                        "of the other ranks, which are not waited for there again; call it on every rank, or create the "
                        "manager on rank 0 alone with options=ManagerOptions(distributed=False) if this is meant",
                        call_site,
                    )
                self._solo_call_sites.add(call_site)
                # For those that stay, or come late.
                store.set("none", "1")
                return None
            # Rank 0's own state is encoded and decoded too, so that it is compared with states that took the
            # same way.
            with _errors_as_ranks_apart(PartLost):
                found = [decode(one) for one in (encode(mine), *self._take(store, others))]
            for name in names:
                with suppress(RuntimeError):  # Not every store can delete keys.
                    store.delete_key(name)
            return found

    def _stay(self, store: Any, data: bytes) -> None:
        """Send this rank's state if rank 0 comes in time."""
        name = str(self.rank)
        store.set(name, _STAYS)
        waiting = _Waiting(self.rank, 2 * _COME_SECONDS, "call save_snapshot")
        while not store.check(["none"]) and store.get(name) == _STAYS and waiting.goes_on():
            pass
        # In one step with the look: rank 0 must not wait for a rank that has left.
        if store.compare_set(name, _STAYS, _LEFT) == _TAKEN:
            send(data, self._quick, 0)
            self.talks_to = [0]

    def _take(self, store: Any, others: Sequence[int]) -> list[bytes | bytearray]:
        """Return the states of the other ranks, all of which have come."""
        said = {rank: bytes(store.get(str(rank))) for rank in others}
        lost = any(one not in (_IN_FILE, _STAYS) for one in said.values())
        for rank in others:
            if said[rank] == _STAYS:
                said[rank] = bytes(store.compare_set(str(rank), _STAYS, _LEFT if lost else _TAKEN))
        # Each that was taken sends, whatever the others do.
        found: dict[int, bytes | bytearray] = {}
        for rank in others:
            if said[rank] == _TAKEN:
                found[rank] = receive(self._quick, rank)
                self.talks_to.append(rank)
        for rank in others:
            if said[rank] == _IN_FILE:
                found[rank] = self._read_file(rank)
            elif rank not in found:
                raise PartLost(f"rank {rank}'s own state is not there: {_reason(said[rank])}")
        return [found[rank] for rank in others]

    def _read_file(self, rank: int) -> bytes:
        """Return the state that a rank has left, and remove its file."""
        path = self._file_of(rank)
        try:
            with open(open_regular(path, os.O_RDONLY), "rb") as file:
                data = file.read(_checked(os.fstat(file.fileno()).st_size))
            path.unlink()
        except OSError as error:
            raise PartLost(f"rank {rank}'s own state cannot be read: {error}") from None
        return data

    def _leave_file(self, data: bytes) -> bytes:
        """Leave this rank's state in the directory; return what its key says."""
        path = self._file_of(self.rank)
        # Not synced: it is of no use to a later process.
        try:
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            return (_FAILED + str(error).encode("utf-8", "replace"))[:_MAX_PROBLEM_BYTES]
        self._left_files.append(path)
        if len(self._left_files) > _KEPT_FILES:
            with suppress(OSError):
                self._left_files.popleft().unlink()
        return _IN_FILE

    def _file_of(self, rank: int) -> Path:
        call = xxhash.xxh3_128(repr(self._call).encode("utf-8", "surrogatepass")).hexdigest()
        return self._files / f"{call}-{rank}"

    @property
    def _files(self) -> Path:
        """Folder of the states that ranks leave for rank 0."""
        return self.directory / "parts" / f"own-{self._prefix.rpartition('/')[2]}"

    def send(self, to: int, value: Any) -> None:
        """Send a value to a rank, which calls `receive`.

        Raises:
            PartLost: The rank is gone.
        """
        with _errors_as_ranks_apart(PartLost):
            send(encode(value), self._quick, to)

    def receive(self, source: int) -> Any:
        """Return the value that a rank sends.

        Raises:
            PartLost: The rank is gone, or has sent what cannot be decoded.
        """
        with _errors_as_ranks_apart(PartLost):
            return decode(receive(self._quick, source))

    def durable(self, seconds: float, *, in_all_directories: bool = False) -> bool:
        """Report on the rank that writes that the requested save has ended, durable or failed; wait for that on the others.

        Args:
            seconds: Longest time to wait.
            in_all_directories: A rank writes in each directory; every rank waits for all of them.

        Returns:
            Whether the report came in time.

        Raises:
            RankMismatch: The store is gone.
        """
        writers = [group[0] for group in self.directories.groups] if in_all_directories else [0]
        names = [f"{writer}/{self._call!r}" for writer in writers]
        with _errors_as_ranks_apart():
            mine = [name for name, writer in zip(names, writers, strict=True) if writer == self.rank]
            store = self._open_keys("durable", *mine)
            for name in mine:
                store.set(name, "1")
            return wait_until(lambda: store.check(names), seconds, _POLL_SECONDS)

    def _all_arrive(self, where: str, seconds: float, what: str) -> bool:
        with _errors_as_ranks_apart():
            store = self._open_keys(where, f"here-{self.rank}", *(() if self.rank else ("all",)))
            return _all_arrived(store, self.rank, self.world_size, seconds, what)

    def _open_keys(self, where: str, *names: str) -> Any:
        """Return the store of keys below ``where``, of which this process sets some.

        They stay as long as another rank may look for them: those of later events replace them.
        """
        prefix = f"{self._prefix}/{where}"
        _keys_set.append((prefix, names))
        while len(_keys_set) > _KEPT_EVENTS:
            old_prefix, old = _keys_set.popleft()
            for name in old:
                with suppress(RuntimeError):  # Not every store can delete keys.
                    self._store(old_prefix).delete_key(name)
        return self._store(prefix)

    def _store(self, prefix: str) -> Any:
        import torch.distributed as dist

        # A private function, but the only way to the store with which the program initialized
        # torch.distributed.
        return dist.distributed_c10d.PrefixStore(prefix, dist.distributed_c10d._get_default_store())

    def vote(self) -> Vote:
        """Return a new vote, which the ranks can use at each boundary."""
        return Vote(self._patient)

    def gather(self, mine: Any) -> list[Any] | None:
        """Return what each rank gave, on rank 0; None on the others. Collective.

        Raises:
            RankMismatch: A rank is gone, or has sent what cannot be decoded.
        """
        with _errors_as_ranks_apart():
            everybody = gather(encode(mine), self._quick)
            return None if everybody is None else [decode(one) for one in everybody]

    def exchange(self, mine: Any) -> list[Any]:
        """Return what each rank gave, on every rank. Collective.

        Raises:
            RankMismatch: A rank is gone, or has sent what cannot be decoded.
        """
        with _errors_as_ranks_apart():
            everybody = all_gather(encode(mine), self._quick)
            return [decode(one) for one in everybody]

    def relay(self, source: int, mine: bytes | bytearray | None) -> bytearray:
        """Return the bytes that one rank gave, on every rank, which decodes them. Collective.

        Unlike `exchange`, which takes memory for the longest message of all ranks from each, this is for messages of
        any length up to MAX_MESSAGE_BYTES.

        Args:
            source: The rank.
            mine: The bytes, on that rank.

        Raises:
            RankMismatch: A rank is gone.
        """
        with _errors_as_ranks_apart():
            return broadcast(mine if self.rank == source else None, self._patient, source)

    def tell(self, what: Any = None) -> Any:
        """Return what rank 0 gave, on every rank; the others wait for it as long as it takes. Collective.

        Raises:
            RankMismatch: Rank 0 is gone, or has sent what cannot be decoded.
        """
        with _errors_as_ranks_apart():
            data = encode(what) if self.saves else None
            return decode(broadcast(data, self._patient))

    def first_problem(self, mine: str) -> str:
        """Return the first text that is not empty, with its rank, on every rank; empty if there is none.

        This is collective.

        Raises:
            RankMismatch: A rank is gone, or has sent what cannot be decoded.
        """
        texts = enumerate(self.exchange(mine))
        return next((f"rank {rank}: {text}" for rank, text in texts if text), "")

    def close(self) -> None:
        """Destroy the process groups, unless the training has ended all groups already."""
        import torch.distributed as dist

        # What others have left after the last call of rank 0 is for nobody.
        if self.saves:
            shutil.rmtree(self._files, ignore_errors=True)
        if dist.is_initialized():
            # Ranks end at different times, and gloo has several errors for a group whose other end is gone.
            for group in (self._quick, self._patient):
                with suppress(RuntimeError, ValueError, AssertionError):
                    dist.destroy_process_group(group)


class Vote:
    """Vote of all ranks at each boundary, with the result of the boundary before.

    The result is the largest number that a rank gave, 0 to 255. The messages travel during the step between
    two boundaries, so the training does not wait for them.
    """

    def __init__(self, group: Any) -> None:
        """Begin without a vote in flight."""
        self._group = group
        self._in_flight: tuple[Any, Any] | None = None

    def __call__(self, wanted: int, again: bool = True) -> int:
        """Return the result of the last vote and begin the next. Collective, at every boundary.

        Args:
            wanted: Vote of this rank.
            again: False if every rank knows that no rank votes at this boundary.

        Raises:
            RuntimeError: The other ranks are gone.
        """
        import torch
        import torch.distributed as dist

        agreed = 0
        if self._in_flight is not None:
            (work, tensor), self._in_flight = self._in_flight, None
            work.wait()
            agreed = int(tensor.item())
        # After an agreement every rank acts at this same boundary, so nothing is left to ask; the next
        # boundary asks again.
        if not agreed and again:
            # Begun here and awaited at the next boundary, so that it travels during the step between.
            tensor = torch.tensor([int(wanted)], dtype=torch.uint8, device="cpu")
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._in_flight = work, tensor
        return agreed


def _reason(said: bytes) -> str:
    """Return why a rank that has come cannot hand in its state."""
    if said.startswith(_FAILED):
        return said.removeprefix(_FAILED).decode("utf-8", "replace")
    return f"it waited {2 * _COME_SECONDS:.0f} s for rank 0 to call save_snapshot, or another rank's is lost"


def _log_alone(rank: int) -> None:
    log.warning(
        "ciuic: not every rank has created a SnapshotManager, so rank %d saves for itself alone, and a resume would "
        "not be exact on the others: create it on every rank, or with options=ManagerOptions(distributed=False) where that is meant",
        rank,
    )


def _find_directories(ranks: Ranks, directory: Path) -> Directories | None:
    """Find out which ranks save in the same directory; None if one has left. Collective.

    Raises:
        RankMismatch: A rank is gone.
    """
    keys = ranks.exchange(_identity_of(directory))
    if None in keys:
        return None
    groups = _joined([[at for at, key in enumerate(keys) if key == own] for own in keys])
    if len(groups) > 1:
        # The same directory has other numbers on each host that mounts it, so each rank looks for the others' files.
        groups = _joined([*groups, *ranks.exchange(_seen_ranks(ranks, directory))])
    hosts = [str(key[0]) for key in keys]
    return Directories(groups, tuple(f"{hosts[group[0]]}:{group[0]}" for group in groups))


def _identity_of(directory: Path) -> list[Any]:
    """Return the host, and what names a directory on it; a container has the boot of its host."""
    try:
        info = os.stat(directory)
        where: list[Any] = [boot_id(), info.st_dev, info.st_ino]
    except OSError:
        where = [os.urandom(16).hex()]
    host = "".join(one if one.isprintable() else "_" for one in socket.gethostname()) or "host"
    return [host[:200], *where]


def _seen_ranks(ranks: Ranks, directory: Path) -> list[int]:
    """Return the ranks whose files are seen in this rank's directory. Collective."""
    folder = directory / "parts" / f"meet-{ranks.tell(os.urandom(16).hex())}"
    # What fails here makes this rank a directory of its own, and must not let the others wait.
    with suppress(OSError):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        (folder / str(ranks.rank)).touch()
    ranks.exchange(None)
    seen = [ranks.rank]
    with suppress(OSError):
        names = (one.name for one in folder.iterdir())
        seen += [int(name) for name in names if name.isdecimal() and int(name) < ranks.world_size]
    # Removed after every rank has looked.
    ranks.exchange(None)
    shutil.rmtree(folder, ignore_errors=True)
    return seen


def _joined(seen: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that are connected: one that sees another shares its directory."""
    groups: list[set[int]] = []
    for some in map(set, seen):
        touched = [group for group in groups if group & some]
        groups = [group for group in groups if not group & some] + [some.union(*touched)]
    return tuple(sorted(tuple(sorted(group)) for group in groups))


@contextmanager
def _errors_as_ranks_apart(kind: type[RankMismatch] = RankMismatch) -> Iterator[None]:
    """Raise the error where the store or a rank is gone, or has sent what cannot be decoded."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise kind(str(error)) from None


def _meet(store: Any, rank: int, world_size: int, seconds: float) -> str:
    """Return a name of this meeting of all ranks, the same on each; empty if not every rank comes in time.

    The store may outlive the ranks: torchrun keeps it while it starts ranks anew, so what ranks of an earlier round
    have left in it must answer for nobody. Rank 0 calls with a random name. The others answer the latest call, each
    with a random name of its own, and believe only what is said to that name.
    """
    own = os.urandom(16).hex()
    waiting = _Waiting(rank, seconds if rank == 0 else 2 * seconds, "make a SnapshotManager")
    if rank:
        # Rank 0 may come last, and then waits the full time itself before it answers.
        answered, call = "", ""
        while waiting.goes_on():
            if store.check([_CALL]):
                call = store.get(_CALL).decode("ascii", "replace")
            if call != answered:
                answered = call
                store.set(f"here-{rank}", f"{call} {own}")
            if store.check([f"all-{rank}"]):
                to, _, meeting = store.get(f"all-{rank}").decode("ascii", "replace").partition(" ")
                if to == own:
                    return str(meeting)
        return ""
    store.set(_CALL, own)
    here: dict[int, str] = {}
    while len(here) < world_size - 1 and waiting.goes_on():
        for one in range(1, world_size):
            if one not in here and store.check([f"here-{one}"]):
                call, _, name = store.get(f"here-{one}").decode("ascii", "replace").partition(" ")
                if call == own:
                    here[one] = name
    meeting = own if len(here) == world_size - 1 else ""
    for one, name in here.items():
        store.set(f"all-{one}", f"{name} {meeting}")
    return meeting


def _all_arrived(store: Any, rank: int, world_size: int, seconds: float, what: str) -> bool:
    """Return whether all ranks come here in time; the same answer on every rank.

    Rank 0 counts the ranks for so many seconds; the others wait for its answer.
    """
    store.set(f"here-{rank}", "1")
    names = ["all"] if rank else [f"here-{one}" for one in range(world_size)]
    # Rank 0 may come last, and then waits the full time itself before it answers.
    waiting = _Waiting(rank, 2 * seconds if rank else seconds, what)
    while not (here := bool(store.check(names))) and waiting.goes_on():
        pass
    # A rank that arrives after rank 0 has answered gets that answer, so that all decide alike.
    if rank:
        return here and bool(store.get("all") == b"1")
    store.set("all", "1" if here else "0")
    return here


class _Waiting:
    """Wait for the other ranks, which is logged where it takes long."""

    def __init__(self, rank: int, seconds: float, what: str) -> None:
        self._rank, self._seconds, self._what = rank, seconds, what
        self._began = 0.0
        self._is_logged = False

    def goes_on(self) -> bool:
        """Return whether there is time left, after a pause from the second call on."""
        now = time.monotonic()
        if not self._began:
            self._began = now
            return True
        if not self._is_logged and now > self._began + _LOG_WAIT_SECONDS:
            self._is_logged = True
            log.warning(
                "ciuic: rank %d waits up to %.0f s for the other ranks to %s; if rank 0 alone is to save, create its "
                "manager with options=ManagerOptions(distributed=False)",
                self._rank,
                self._seconds,
                self._what,
            )
        time.sleep(_POLL_SECONDS)
        return now < self._began + self._seconds
