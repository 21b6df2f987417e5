"""Loading of states that several directories have together: hosts without a file system in common, each with a part.

The parts of a state are snapshots of one set (`ciuic.types.SetMember`): each has what all ranks have alike, and the
shards of the ranks of its directory. They lie in the directories of the ranks that load, on remotes, or in both.
Rank 0 chooses the newest set that is whole, from what all directories and the remotes have. Then the ranks tell each
other the headers of all files with shards, so that each knows where every piece is: it reads pieces of its own
directory there, others from a remote, and no piece that it does not need. So a run that begins anew on the same hosts
needs no remote, and any host takes the place of one that is lost once the remote has its part.

A state that is no set is loaded alike: where a rank can read it neither in its directory nor on a remote, a rank that
can sends it.

A process that reads one repository or remote, as `export` does, gets the state of a set by `whole_state`.

Guarantees: a set that lacks a member is never loaded, and is named. All ranks get the same state, or the same error.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.remote.objects.model import RemoteRefused, RemoteUnreachable
from ciuic.repository import Repository
from ciuic.structs import decode_msgpack
from ciuic.training.format.layout import SUFFIX, decode_header
from ciuic.training.format.reading import NoUsableSnapshot, PassedOver, check_unreadable, load_from
from ciuic.training.format.shards import TemplateLookup, parse_piece
from ciuic.training.format.stored_files import (
    ReadFrom,
    SnapshotRef,
    StateFiles,
    StateRef,
    first_bytes,
    open_repository,
)
from ciuic.training.logs import log
from ciuic.training.ranks import Ranks
from ciuic.training.remote.copies import RemoteCandidate, RemoteTraining
from ciuic.training.results import State
from ciuic.training.state import rank_state
from ciuic.types import SetMember, SnapshotId
from ciuic.units import plural

_NEWEST: Final = 20
"""Snapshots that are looked at for sets, of which an old one is loaded only where all of these are damaged."""
_SENT_BYTES: Final = 64 << 20
"""Part of a file that is sent at once; a multiple of every size of blocks."""
_SENT_BLOCK_BYTES: Final = 256 << 10
"""Block of files that were sent, which are in memory: any size would do."""
_ON_NO_REMOTE: Final = "and on no remote yet"
ALONE: Final = ""
"""Name of the only member of a state that is no set."""


class _Copy(NamedTuple):
    """Where a part of a state lies."""

    id: str
    directory: int
    """Number of the directory of the ranks; -1: on a remote."""
    remote: str = ""
    space: int = 0


class _Found(msgspec.Struct, frozen=True):
    """A snapshot of the training in one place."""

    time_ns: int
    copy: _Copy
    member: SetMember | None = None


class Candidate(msgspec.Struct, frozen=True):
    """A state that could be loaded."""

    id: str
    """Id of one of its snapshots, by which it is called."""
    time_ns: int
    members: dict[str, list[_Copy]]
    """Copies of each member; a set whose hosts are lost may lack some."""

    @property
    def lacking(self) -> list[str]:
        """Members of which nothing is left."""
        return [name for name, copies in self.members.items() if not copies]


class _Choice(msgspec.Struct, frozen=True):
    """What rank 0 tells: the candidates, newest first, or why there are none."""

    candidates: list[Candidate] = []
    problem: str = ""
    unseen: str = ""
    """Why the remotes were not looked at, where the directories have something."""

    def check(self, directories: int, remotes: Collection[str]) -> None:
        """Raise Damaged for copies that lie nowhere: whoever reaches the port of the training can send anything."""
        for candidate in self.candidates:
            for copy in itertools.chain.from_iterable(candidate.members.values()):
                known = copy.remote in remotes if copy.directory < 0 else copy.directory < directories
                if not known:
                    raise Damaged("another rank told of a copy in a place that is not known here")


class FileStart(msgspec.Struct, frozen=True, array_like=True):
    """Size and header of a file of a set, enough to plan its reading."""

    size_bytes: int
    header: bytes
    has_only_pieces: bool


class PartTold(msgspec.Struct, frozen=True):
    """What one rank tells the others of a member."""

    pieces: dict[str, FileStart] = {}
    """Files with shards, by path."""
    sent: dict[str, Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]] = {}
    """Sizes of files that are sent, because some ranks cannot read them; all files of the member, or none."""
    problem: str = ""
    is_unreachable: bool = False
    """True if the problem says nothing about the state."""


def are_in_parts(save_dir: Path, root: bytes, training: RemoteTraining, ranks: Ranks | None) -> bool:
    """Return whether the ranks save in several directories, or the newest states were saved so. Collective."""
    if ranks is not None and len(ranks.directories.groups) > 1:
        return True
    if ranks is None or ranks.saves:
        found = _has_sets(save_dir, root, training)
        return found if ranks is None else bool(ranks.tell(found))
    return bool(ranks.tell())


def _has_sets(save_dir: Path, root: bytes, training: RemoteTraining) -> bool:
    try:
        with Repository.open(save_dir) as repository:
            newest = repository.snapshots.list(root=root)[:_NEWEST]
            if any(_member_of(repository, info.id) for info in newest):
                return True
        return any(training.member_of(one) for one in training.candidates()[:_NEWEST])
    # Whoever loads meets it again, and knows what is in reach all the same.
    except (CiuicError, OSError):
        return False


def load_newest_whole(
    save_dir: Path,
    root: bytes,
    templates: Mapping[str, TemplateLookup] | None,
    *,
    ranks: Ranks | None,
    training: RemoteTraining,
) -> State | None:
    """Return the newest state that is whole, wherever its parts are; None if there is none. Collective.

    Args:
        save_dir: Repository of this rank.
        root: Path of the training in its snapshots.
        templates: Templates of the objects of which this rank has a part.
        ranks: The ranks; None: this process is alone.
        training: The training's snapshots on remotes.

    Raises:
        NoUsableSnapshot: There are snapshots, and none is whole.
        Damaged: A rank cannot reach what holds them.
        CiuicError: Nothing is here, and a remote cannot be read.
    """
    own = _local(save_dir, root, ranks)
    choice = _choose(own, training, ranks)
    if choice.problem:
        raise CiuicError(choice.problem)
    choice.check(len(own), training.names)
    passed_over: list[PassedOver] = []
    for candidate in choice.candidates:
        if candidate.lacking:
            some = ", ".join(candidate.lacking)
            reason = f"of its {plural(len(candidate.members), 'part')} those of {some} are nowhere"
            where_else = bool(choice.unseen)
        else:
            state, reason = _Loading(candidate, save_dir, templates, ranks, training).load()
            if state is not None:
                state.passed_over = passed_over
                # A newer one that lacks a part may have it again one day, when its host is back.
                state.time_ns = max(state.time_ns, choice.candidates[0].time_ns)
                return state
            where_else = bool(choice.unseen) and _ON_NO_REMOTE in reason
        if where_else:
            # An older one would cost steps that are not lost, and none at all would be a new run.
            raise RemoteUnreachable(f"{candidate.id} cannot be loaded without the remote: {choice.unseen}")
        log.warning("ciuic: snapshot %s is passed over: %s", candidate.id, reason)
        passed_over.append(PassedOver(candidate.id, reason))
    if passed_over:
        raise NoUsableSnapshot(passed_over)
    problem = ""
    if ranks is None or ranks.leads_directory:
        with Repository.open(save_dir) as repository:
            try:
                check_unreadable(repository.snapshots)
            except NoUsableSnapshot as error:
                problem = error.message
    if told := problem if ranks is None else ranks.first_problem(problem):
        raise Damaged(told)
    return None


def whole_state(places: Sequence[ReadFrom], id_: str) -> StateRef:
    """Return a stored state for a process that has no ranks: the snapshot, or all members of the set that it is of.

    Args:
        places: Repositories, of which the first has the snapshot, and each may have other members.
        id_: The snapshot.

    Raises:
        NotFound: There is no such snapshot, or members of its set are in none of these repositories.
        Damaged: A member cannot be read.
    """
    with open_repository(places[0]) as repository:
        own = repository.snapshots.load(SnapshotId(id_)).set_member
    if own is None or len(own.members) == 1:
        return SnapshotRef(places[0], id_)
    refs = {own.member: SnapshotRef(places[0], id_)}
    for place in places:
        with open_repository(place) as repository:
            for one in repository.snapshots.sets():
                if (one.id, one.members) == (own.id, own.members):
                    for member, snapshot in one.found.items():
                        refs.setdefault(member, SnapshotRef(place, snapshot.id))
    if lacking := [member for member in own.members if member not in refs]:
        raise NotFound(
            f"{id_} is one of the {len(own.members)} parts of {own.name}, and not here are those of {', '.join(lacking)}",
            hint="a remote of the training has all of them; resume() and load_latest_snapshot() put the newest state together",
        )
    parts = []
    # The order of the names, as for ranks without a part of their own: whichever member was named, the state is the same.
    for member in own.members:
        ref = refs[member]
        try:
            with ref.open() as files:
                parts.append(_Part(member, ref, _pieces_of(files), is_own=True))
        except ValueError as error:
            raise Damaged(f"{ref.id}, a part of {own.name}, cannot be read: {error}") from None
    return _SetRef(tuple(parts), {})


# -- which


def _local(save_dir: Path, root: bytes, ranks: Ranks | None) -> list[list[_Found]]:
    """Return what each directory has. Collective."""
    mine: list[_Found] = []
    number = 0 if ranks is None else ranks.directories.number_of(ranks.rank)
    problem = ""
    if ranks is None or ranks.leads_directory:
        try:
            with Repository.open(save_dir) as repository:
                for info in repository.snapshots.list(root=root):
                    member = _member_of(repository, info.id)
                    mine.append(_Found(info.order_ns, _Copy(str(info.id), number), member))
        except (CiuicError, OSError) as error:
            problem = str(error)
    if ranks is None:
        if problem:
            raise Damaged(problem)
        return [mine]
    if told := ranks.first_problem(problem):
        raise Damaged(f"no snapshot can be read by all ranks: {told}")
    sent = msgspec.msgpack.encode(mine)
    leaders = [group[0] for group in ranks.directories.groups]
    return [decode_from_rank(ranks.relay(leader, sent), list[_Found]) for leader in leaders]


_T = TypeVar("_T")


def decode_from_rank(data: bytearray, kind: type[_T]) -> _T:
    """Decode what another rank has told; whoever reaches the port of the training can send anything."""
    try:
        return decode_msgpack(bytes(data), kind)
    except msgspec.DecodeError as error:
        raise Damaged(f"another rank sent an invalid message: {error}") from None


def _member_of(repository: Repository, id_: Any) -> SetMember | None:
    """Return the place of a snapshot in a set; one that cannot be read is a candidate of its own, and fails later."""
    try:
        return repository.snapshots.load(id_).set_member
    except CiuicError:
        return None


def _choose(own: list[list[_Found]], training: RemoteTraining, ranks: Ranks | None) -> _Choice:
    """Return the candidates. Collective: rank 0 looks, and tells the others."""
    choice = _Choice()
    if ranks is None or ranks.saves:
        here = [found for some in own for found in some]
        try:
            remote = [
                _Found(one.time_ns, _Copy(one.id, -1, one.remote, one.space), training.member_of(one))
                for one in training.candidates()
            ]
            choice = _Choice(candidates(here + remote))
        except CiuicError as error:
            if here:
                # Without the network a run must go on where it can.
                log.warning(
                    "ciuic: resuming from these directories without looking at the remote: %s", error.message
                )
                choice = _Choice(candidates(here), unseen=error.message)
            else:
                choice = _Choice(problem=error.message)
    if ranks is None:
        return choice
    return decode_from_rank(ranks.relay(0, msgspec.msgpack.encode(choice)), _Choice)


def candidates(found: Sequence[_Found]) -> list[Candidate]:
    """Put copies and members together, newest first."""
    made: dict[tuple[str, str], Candidate] = {}
    for one in sorted(found, key=lambda one: (-one.time_ns, one.copy.directory < 0, one.copy)):
        member = one.member
        # The copies of a snapshot that is no set have its id and its time.
        key = (member.id, "") if member is not None else (one.copy.id, str(one.time_ns))
        if key not in made:
            names = (ALONE,) if member is None else member.members
            made[key] = Candidate(one.copy.id, one.time_ns, {name: [] for name in names})
        copies = made[key].members.get(ALONE if member is None else member.member)
        # A member that its set does not name is not of it.
        if copies is not None:
            copies.append(one.copy)
    return list(made.values())


# -- loading one


class _Loading:
    """Loading of one candidate."""

    def __init__(
        self,
        candidate: Candidate,
        save_dir: Path,
        templates: Mapping[str, TemplateLookup] | None,
        ranks: Ranks | None,
        training: RemoteTraining,
    ) -> None:
        self._candidate = candidate
        self._save_dir = save_dir
        self._templates = templates
        self._ranks = ranks
        self._training = training
        self._number = 0 if ranks is None else ranks.directories.number_of(ranks.rank)

    def load(self) -> tuple[State | None, str]:
        """Return the state; None with the reason if a rank cannot read it. Collective.

        Raises:
            Damaged: A rank cannot reach what holds it, which says nothing about the state.
        """
        told = {
            member: self._told(number, member, copies)
            for number, (member, copies) in enumerate(self._candidate.members.items())
        }
        problems = {member: one for member, one in told.items() if one.problem}
        for member, one in problems.items():
            if one.is_unreachable:
                raise Damaged(
                    f"{self._candidate.id} cannot be read by all ranks: {member or 'it'}: {one.problem}"
                )
        if problems:
            return None, "; ".join(f"{member or 'it'}: {one.problem}" for member, one in problems.items())
        content, problem = self._received(told)
        if problem:
            return None, problem
        state, reason, unreachable = None, "", ""
        try:
            state = State(load_from(self._ref(told, content), self._candidate.id, self._templates))
        # These say nothing about the snapshot, so no older one may be taken for it.
        except (OSError, RemoteUnreachable, RemoteRefused) as error:
            unreachable = str(error)
        except (CiuicError, ValueError) as error:
            reason = str(error)
        if found := self._first_problem(unreachable):
            raise Damaged(f"{self._candidate.id} cannot be read by all ranks: {found}")
        if found := self._first_problem(reason):
            return None, found
        assert state is not None
        if self._ranks is not None:
            rank_state.apply_own_state(state, state.ranks, self._ranks.rank)
        return state, ""

    def _first_problem(self, mine: str) -> str:
        return mine if self._ranks is None else self._ranks.first_problem(mine)

    def _told(self, number: int, member: str, copies: Sequence[_Copy]) -> PartTold:
        """Return what the rank that looks at a member tells of it. Collective."""
        teller = self._teller(number, copies)
        mine = self._look(member, copies) if teller == self._rank else None
        if self._ranks is None:
            assert mine is not None
            return mine
        sent = None if mine is None else msgspec.msgpack.encode(mine)
        return decode_from_rank(self._ranks.relay(teller, sent), PartTold)

    def _readable(self, member: str) -> SnapshotRef | None:
        """Return what this rank can read a member from: its directory first, or a remote."""
        copies = self._candidate.members[member]
        for copy in copies:
            if copy.directory == self._number:
                return SnapshotRef(str(self._save_dir), copy.id)
        for copy in copies:
            if copy.directory < 0:
                remote = RemoteCandidate(copy.remote, copy.space, self._candidate.time_ns, copy.id)
                # Contacted when something is read: most ranks need nothing of members that are elsewhere.
                return SnapshotRef(partial(self._open_remote, remote), copy.id)
        return None

    def _open_remote(self, copy: RemoteCandidate) -> Repository:
        return self._training.opener(copy)()

    def _look(self, member: str, copies: Sequence[_Copy]) -> PartTold:
        """Return what this rank tells the others of a member."""
        try:
            ref = self._readable(member)
            assert ref is not None
            with ref.open() as files:
                sent = {name: files.size_bytes(name) for name in files.names()}
                return PartTold(_pieces_of(files), sent if self._is_sent(copies) else {})
        except (OSError, RemoteUnreachable, RemoteRefused) as error:
            return PartTold(problem=str(error) or type(error).__name__, is_unreachable=True)
        except (CiuicError, ValueError) as error:
            return PartTold(problem=str(error) or type(error).__name__)

    def _received(self, told: Mapping[str, PartTold]) -> tuple[dict[str, bytearray], str]:
        """Return the files that are sent, where this rank cannot read them, and why not. Collective."""
        member, one = next(((member, one) for member, one in told.items() if one.sent), ("", PartTold()))
        if self._ranks is None or not one.sent:
            return {}, ""
        source = self._teller(list(told).index(member), self._candidate.members[member])
        ref, rooms, problem = self._readable(member), dict[str, bytearray](), ""
        try:
            if ref is None:
                rooms = {name: bytearray(size) for name, size in one.sent.items()}
        except MemoryError:
            problem = "the state does not fit into memory"
        # Before anything is sent: a rank that fails in between would let the others wait.
        if found := self._first_problem(problem):
            raise Damaged(f"{self._candidate.id} cannot be read by all ranks: {found}")
        with ExitStack() as opened:
            files = None
            if source == self._rank and ref is not None:
                try:
                    files = opened.enter_context(ref.open())
                except (CiuicError, OSError) as error:
                    problem = str(error)
            for name, size_bytes in one.sent.items():
                for begin in range(0, size_bytes, _SENT_BYTES):
                    room = bytearray(min(_SENT_BYTES, size_bytes - begin))
                    try:
                        if files is not None and not problem:
                            files.read_into(name, memoryview(room), begin // files.block_size)
                    except (CiuicError, OSError) as error:
                        problem = str(error)
                    block = self._ranks.relay(source, room)
                    if name in rooms:
                        rooms[name][begin : begin + len(room)] = block[: len(room)].ljust(len(room), b"\0")
        return rooms, self._first_problem(problem)

    @property
    def _rank(self) -> int:
        return 0 if self._ranks is None else self._ranks.rank

    def _teller(self, number: int, copies: Sequence[_Copy]) -> int:
        """Return the rank that tells the others of a member: one that has it in its directory, or each in turn."""
        if self._ranks is None:
            return 0
        here = [copy.directory for copy in copies if copy.directory >= 0]
        return self._ranks.directories.groups[here[0]][0] if here else number % self._ranks.world_size

    def _is_sent(self, copies: Sequence[_Copy]) -> bool:
        """Return whether ranks can read this state only if it is sent to them; not a member of a set."""
        if self._ranks is None or len(self._candidate.members) > 1:
            return False
        on_remote = any(copy.directory < 0 for copy in copies)
        return not on_remote and len({copy.directory for copy in copies}) < len(
            self._ranks.directories.groups
        )

    def _ref(self, told: Mapping[str, PartTold], content: Mapping[str, bytearray]) -> _SetRef:
        """Return the state as this rank reads it."""
        parts = []
        for member, copies in self._candidate.members.items():
            is_own = any(copy.directory == self._number for copy in copies)
            parts.append(_Part(member, self._readable(member), told[member].pieces, is_own))
        # What every member has is read from the own directory, if it has one of them.
        parts.sort(key=lambda part: not part.is_own)
        return _SetRef(tuple(parts), content)


def _pieces_of(files: StateFiles) -> dict[str, FileStart]:
    """Return the files that hold shards."""
    found = {}
    for name in files.names():
        if name.endswith(SUFFIX):
            start = first_bytes(files, name)
            held = decode_header(start, files.size_bytes(name))
            assert not isinstance(held, int)
            are_pieces = [parse_piece(tensor) is not None for tensor in held]
            if any(are_pieces):
                found[name] = FileStart(files.size_bytes(name), start, all(are_pieces))
    return found


class _Part(NamedTuple):
    """A member as one rank sees it."""

    name: str
    ref: SnapshotRef | None
    """What it is read from; None: this rank cannot."""
    pieces: Mapping[str, FileStart]
    is_own: bool
    """True if it lies in the directory of this rank."""


class _SetRef(NamedTuple):
    """A state whose parts lie in several places, as one rank reads it."""

    parts: tuple[_Part, ...]
    content: Mapping[str, bytearray]
    """Files that another rank has sent."""

    @contextmanager
    def open(self) -> Iterator[StateFiles]:
        """Open the files of this thread; those of other places when they are read."""
        with ExitStack() as opened:
            yield _SetFiles(self, opened)


class _SetFiles:
    """Files of a set for one thread: all of one part, and of the others those with shards, under names of their own."""

    def __init__(self, state: _SetRef, opened: ExitStack) -> None:
        self._content = state.content
        self._closing = opened
        self._opened: dict[str, StateFiles] = {}
        # What is no piece every member has alike; the first is of this rank's directory if it has one.
        self._first = next((part for part in state.parts if part.ref is not None), None)
        self._elsewhere: dict[str, tuple[_Part, str, FileStart]] = {}
        for part in state.parts:
            if part is not self._first:
                for path, start in part.pieces.items():
                    # No file has such a name; what comes first is that of the object.
                    folder, _, file = path.partition("/")
                    self._elsewhere[f"{folder}/\0{part.name}/{file}"] = part, path, start

    @property
    def block_size(self) -> int:
        """Size of a block of the files in bytes."""
        return _SENT_BLOCK_BYTES if self._content else self._files(self._first).block_size

    @property
    def time_ns(self) -> int:
        """Place of the state in the order of snapshots; 0: not known."""
        return 0 if self._content else self._files(self._first).time_ns

    def names(self) -> Iterator[str]:
        """Iterate over the paths."""
        yield from self._elsewhere
        yield from self._content or self._files(self._first).names()

    def size_bytes(self, name: str) -> int:
        """Return the size of a file; NotFound if there is none."""
        if name in self._elsewhere:
            return self._elsewhere[name][2].size_bytes
        if name in self._content:
            return len(self._content[name])
        return self._files(self._first).size_bytes(name)

    def read(self, name: str) -> bytearray:
        """Return the content of a document; as `Files.read`."""
        if name in self._content:
            return self._content[name]
        return self._files(self._first).read(name)

    def read_into(self, name: str, into: memoryview, first_block: int = 0) -> None:
        """Read and check content; as `read_file`."""
        if name in self._content:
            begin = first_block * self.block_size
            into[:] = self._content[name][begin : begin + len(into)]
            return
        part, path, _ = self._elsewhere.get(name, (self._first, name, None))
        files = self._files(part)
        if files.block_size != self.block_size:
            raise ValueError(
                f"the parts of the state have blocks of {files.block_size} and of {self.block_size} bytes"
            )
        files.read_into(path, into, first_block)

    def known_start(self, name: str) -> bytes | None:
        """Return the header of a file with shards that this rank may not need."""
        if name in self._elsewhere:
            return self._elsewhere[name][2].header
        first = self._first
        # A remote is not asked for what another rank has told.
        told = None if first is None or first.is_own else first.pieces.get(name)
        return told.header if told is not None and told.has_only_pieces else None

    def _files(self, part: _Part | None) -> StateFiles:
        """Return the files of a part, opened once for this thread."""
        if part is None or part.ref is None:
            where = (
                "another directory" if part is None or part.name == ALONE else f"the directory of {part.name}"
            )
            raise NotFound(f"a part that this rank needs lies in {where} alone, {_ON_NO_REMOTE}")
        if part.name not in self._opened:
            self._opened[part.name] = self._closing.enter_context(part.ref.open())
        return self._opened[part.name]
