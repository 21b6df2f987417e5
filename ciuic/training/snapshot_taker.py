"""Content of a snapshot: the states of the registered objects, of this process alone or agreed with other ranks.

Guarantees: on several ranks all count from the step of a snapshot, even if it fails. What fails before the state is
staged is told to `SavePipeline.outcome`, except for errors of the program itself (`Unsaveable`). No tensor is copied here.

Of a sharded state all ranks stage their parts at the same step, or none does. Before anything is staged, they exchange
whether they can save, what they would store, and the token that rank 0 gave the snapshot. From then on no rank waits
for another: each writer stores its part, and that of the first rank of a directory makes the snapshot when all have
(`writer.rank_parts`). Ranks that save in several directories (hosts without a file system in common) make as many
snapshots, in parallel, which together are a set: each has what all ranks have alike, and the shards of its own ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from ciuic.repository import Repository
from ciuic.repository.locks import Claim
from ciuic.system.slurm import job_tags
from ciuic.training import arguments
from ciuic.training.format import shards
from ciuic.training.format.reading import (
    STATE_VERSION,
    Facts,
    facts_summary,
    framework_versions,
    metric_floats,
)
from ciuic.training.format.shards import are_sharded
from ciuic.training.format.structure import Leaf, encode_json, pack
from ciuic.training.logs import log, quietly
from ciuic.training.name_lock import NameLock
from ciuic.training.ranks import PartLost, RankMismatch, Ranks, decode, encode
from ciuic.training.results import Save, SaveResult
from ciuic.training.save_pipeline import GatheredState, NotStaged, SavePipeline
from ciuic.training.save_schedule import SaveSchedule
from ciuic.training.state import rank_state, stateful
from ciuic.training.state.rank_state import BoundaryState, RankState, TooDifferent
from ciuic.training.state.registered import Registered
from ciuic.training.state.stateful import unregistered
from ciuic.training.trackers import TrackerFeeds
from ciuic.training.writer.messages import JointSave, Manifest
from ciuic.training.writer.paired_files import FilesystemPairing, Roots, planned_id
from ciuic.training.writer.rank_parts import report_failure
from ciuic.types import SetMember

TAG: Final = "training"
"""Tag of every snapshot of a training state."""
_AT_END: Final = "skipped before the end"
"""Reason in a snapshot that was due while the writer was busy, and is taken when the manager is closed."""
VALUES: Final = "values"
"""Name under which the manager's own values are packed, as an object among the others."""


class RunProgress:
    """Progress of the run."""

    def __init__(self) -> None:
        self.id = os.urandom(16).hex()
        """Id of the run; a resumed run keeps it."""
        self.step = 0
        self.epoch: int | None = None
        """Epoch that the program named last."""
        self.newest_ns = 0
        """Time of the newest state of the run, also of one that another host has saved."""

    def next_time_ns(self) -> int:
        """Return the time of a state that is saved now: later than all before it, whatever clocks of hosts said."""
        return max(time.time_ns(), self.newest_ns + 1)


class SnapshotSpec(NamedTuple):
    """Properties of a snapshot that is to be taken."""

    reason: str
    epoch: int | None = None
    metrics: Mapping[str, float] = MappingProxyType({})
    plain: Mapping[str, Any] = MappingProxyType({})
    tags: tuple[str, ...] = ()
    hold: str = ""
    """Reason for which the snapshot is held; empty if it is not."""
    filesystem: Roots | None = None
    """Directories whose files are wanted with it; None for the manager's default."""
    may_wait: bool = False
    """True if it may wait for the writer to finish an earlier one."""
    boundary_state: BoundaryState | None = None
    """State to save in place of the current generators and positions."""


def explicit_request(
    model: Any,
    optimizer: Any,
    epoch: Any,
    others: Mapping[str, Any],
    metrics: Mapping[str, Any],
    tags: Any,
    hold: Any,
    filesystem: Roots | None,
) -> tuple[dict[str, Any], SnapshotSpec]:
    """Validate the arguments of `save_snapshot`.

    Returns:
        The objects by name, and the properties of the snapshot.

    Raises:
        TypeError: an argument has the wrong type.
    """
    objects, plain = arguments.objects_and_values(model, optimizer, others)
    return objects, SnapshotSpec(
        "asked for",
        None if epoch is None else arguments.whole_number(epoch, "epoch"),
        arguments.numbers(metrics),
        plain,
        arguments.texts(tags),
        arguments.reason(hold),
        filesystem,
        may_wait=True,
    )


def gather(
    objects: Mapping[str, Any],
    plain: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    with_shards: bool = False,
) -> GatheredState:
    """Gather the state of all objects without copying a tensor.

    Args:
        objects: states by name.
        plain: values that come back under their own names.
        values: values of the manager itself.
        with_shards: True if other ranks store their parts of sharded tensors (`_rank_pieces`).

    Raises:
        Unsaveable: a value cannot be stored.
    """
    leaves: dict[str, list[Leaf]] = {}
    skeletons = {}
    for name, value in (*objects.items(), *plain.items(), (VALUES, dict(values))):
        packed = pack(value, name, with_shards=with_shards)
        leaves[name] = packed.leaves
        skeletons[name] = packed.skeleton
    document = {
        "version": STATE_VERSION,
        "plain": list(plain),
        "values": skeletons.pop(VALUES),
        "objects": skeletons,
    }
    return GatheredState(leaves, encode_json(document))


def _rank_pieces(objects: Mapping[str, Any], rank: int) -> GatheredState:
    """Gather only the pieces of sharded tensors, for a rank whose other state is stored by rank 0.

    Raises:
        Unsaveable: a value cannot be stored.
    """
    leaves = {}
    for name, value in objects.items():
        leaves[name] = [leaf for leaf in pack(value, name, with_shards=True).leaves if leaf.is_piece]
    # Without a document: rank 0 stores the one that all ranks share.
    return GatheredState(leaves, b"", f".rank{rank}")


class RanksApart(NamedTuple):
    """The ranks cannot save together: one has ended or cannot be reached, or they differ in too much."""

    problem: str


class AgreedSave(NamedTuple):
    """Agreement of all ranks to save now."""

    parts: list[RankState]
    joint_save: JointSave
    size_bytes: int
    """Size of all ranks' parts together."""
    run: str
    """Id of the run, that of rank 0."""
    time_ns: int
    """Time of the state by the clock of rank 0, the same in all directories."""
    metrics: Mapping[str, float]
    """Metrics that rank 0 was told, by which every directory keeps the same snapshots."""
    claim: Claim | None
    """Claim on the repository, on the first rank of a directory: nothing is swept until the snapshot is made."""


GatheredStates = list[RankState] | AgreedSave | RanksApart | None
"""States of the ranks themselves: those of all on rank 0, and [] on the others. For a sharded state the agreement,
or [] on all if they skip this save. None where this process saves for itself.
"""


class _Readiness(NamedTuple):
    """Message of one rank before a sharded save."""

    mine: RankState
    token: str
    is_busy: bool
    outline: str
    """Digest of what must be the same on all ranks."""
    size_bytes: int
    run: str
    time_ns: int
    metrics: dict[str, float]

    def message(self) -> dict[str, Any]:
        """Return the plain value that is sent to other ranks."""
        return {**self._asdict(), "mine": self.mine.message()}

    @classmethod
    def of(cls, message: Any) -> _Readiness:
        """Decode the message of another rank.

        Raises:
            ValueError: it is something else.
        """
        try:
            made = cls(**{**message, "mine": RankState.of(message["mine"])})
        except (TypeError, LookupError):
            made = None
        texts = () if made is None else (made.token, made.outline, made.run)
        if (
            made is None
            or not all(isinstance(text, str) for text in texts)
            or type(made.size_bytes) is not int
            or type(made.time_ns) is not int
            or not 0 <= made.time_ns < 1 << 62
            or not isinstance(made.metrics, dict)
            or not all(isinstance(key, str) and type(one) is float for key, one in made.metrics.items())
        ):
            raise ValueError("another rank sent an invalid message before a sharded save")
        return made


def _gather_part(objects: Mapping[str, Any], states: Mapping[str, Any], ranks: Ranks) -> GatheredState:
    """Gather what this rank stores, without the documents of the snapshot.

    Raises:
        Unsaveable: a value cannot be stored.
    """
    for name, value in objects.items():
        shards.check_optimizer(value, name)
    if not ranks.leads_directory:
        return _rank_pieces(states, ranks.rank)
    return gather(states, {}, {}, with_shards=True)


def agree(
    ranks: Ranks,
    repository: str,
    objects: Mapping[str, Any],
    states: Mapping[str, Any],
    *,
    is_busy: bool,
    run: RunProgress,
    metrics: Mapping[str, float],
    at: BoundaryState | None = None,
) -> AgreedSave | None:
    """Agree with the other ranks on a save. Collective.

    Args:
        ranks: connection to the other ranks.
        repository: path of the repository.
        objects: registered objects by name.
        states: their states by name.
        is_busy: whether this rank has no free arena.
        run: progress of the run on this rank.
        metrics: metrics that this rank was told.
        at: generators and positions to save in place of the current ones.

    Returns:
        The agreement; None on all ranks if one has no room.

    Raises:
        RankMismatch: another rank cannot be reached or sent something else.
        ValueError: on all ranks, if one has a state that cannot be stored.
    """
    claim = None
    if ranks.leads_directory:
        # Claimed before any rank stores: a prune between two parts would free what no snapshot refers to yet.
        with Repository.open(repository) as opened:
            claim = opened.claim()
    try:
        agreed = _agree(ranks, objects, states, is_busy, run, dict(metrics), at)
    except BaseException:
        if claim is not None:
            claim.release()
        raise
    if agreed is None:
        if claim is not None:
            claim.release()
        return None
    return agreed._replace(claim=claim)


def _agree(
    ranks: Ranks,
    objects: Mapping[str, Any],
    states: Mapping[str, Any],
    is_busy: bool,
    run: RunProgress,
    metrics: dict[str, float],
    at: BoundaryState | None,
) -> AgreedSave | None:
    """Exchange the ranks' messages and compare them."""
    mine, size_bytes = rank_state.own_state(objects, at), 0
    try:
        size_bytes = _gather_part(objects, states, ranks).size_bytes
    except (TypeError, ValueError) as error:
        # Sent to the other ranks instead of raised here: all must leave the exchange together, and raise
        # alike.
        mine = RankState({}, str(error))
    # Random: reports that a dead run left in the same directory must not count for this snapshot.
    token = os.urandom(16).hex() if ranks.saves else ""
    ready = _Readiness(
        mine, token, is_busy, _outline(states), size_bytes, run.id, run.next_time_ns(), metrics
    )
    try:
        all_ready = [_Readiness.of(one) for one in ranks.exchange(ready.message())]
    except ValueError as error:
        raise RankMismatch(str(error)) from None
    _raise_first_problem([one.mine for one in all_ready])
    # Pipeline parallelism: each rank has tensors that no other knows.
    if any(one.outline != all_ready[0].outline for one in all_ready):
        raise ValueError(
            "the ranks have different tensors, or shards of different ones: save such states with "
            "torch.distributed.checkpoint and ciuic.training.dcp.storage"
        )
    # All or none: the writer of a directory would wait for the missing part and then make no snapshot.
    if any(one.is_busy for one in all_ready):
        log.warning("ciuic: snapshot skipped: the writer of one rank is still storing earlier ones")
        return None
    # The same on all ranks, each of which has all digests.
    parts = [one.mine for one in all_ready]
    for rank, keys in rank_state.wanted(parts).items():
        own = encode(rank_state.wanted_states(objects, keys).message()) if rank == ranks.rank else None
        try:
            more = RankState.of(decode(ranks.relay(rank, own)))
        except ValueError as error:
            raise RankMismatch(str(error)) from None
        # The others only need to know of a problem.
        parts[rank] = parts[rank].with_wanted(more if ranks.leads_directory else RankState({}, more.problem))
    _raise_first_problem(parts)
    return AgreedSave(
        parts,
        JointSave(all_ready[0].token, ranks.rank, ranks.shared_by),
        sum(one.size_bytes for one in all_ready),
        all_ready[0].run,
        all_ready[0].time_ns,
        all_ready[0].metrics,
        None,
    )


def _outline(states: Mapping[str, Any]) -> str:
    """Return the digest of the names, shapes and dtypes that all ranks must share."""
    # A digest, because only equality matters and every rank gets it from all others.
    whole = xxhash.xxh3_128()
    for line in shards.outline(states):
        whole.update(line.encode("utf-8", "surrogatepass"))
    return whole.hexdigest()


def _raise_first_problem(parts: Sequence[RankState]) -> None:
    """Raise ValueError if a rank cannot tell its state."""
    for rank, one in enumerate(parts):
        if one.problem:
            raise ValueError(f"rank {rank}: {one.problem}")


def _decode_states(messages: Sequence[Any] | None) -> list[RankState] | None:
    """Decode the states that the other ranks sent.

    Raises:
        RankMismatch: one of them sent something else.
    """
    return None if messages is None else [_decode_state(message) for message in messages]


def _decode_state(message: Any) -> RankState:
    """Decode the state that another rank sent.

    Raises:
        RankMismatch: it sent something else.
    """
    try:
        return RankState.of(message)
    except ValueError as error:
        raise RankMismatch(str(error)) from None


class _SkippedSave(NamedTuple):
    """The last save that was due and was skipped because the writer was busy."""

    step: int
    request: SnapshotSpec
    """Properties of the snapshot, with the generators and positions of its boundary."""
    parts: list[RankState] | None
    """States of the ranks at that boundary; None: of this process alone, or sharded."""


class SnapshotTaker:
    """Taking of a manager's snapshots, alone or together with other ranks."""

    def __init__(
        self,
        run: RunProgress,
        registered: Registered,
        schedule: SaveSchedule,
        pipeline: SavePipeline,
        ranks: Ranks | None,
        pairing: FilesystemPairing,
        name_lock: NameLock,
        trackers: TrackerFeeds,
    ) -> None:
        """Connect the parts of a manager that a snapshot needs.

        Args:
            run: progress of the run.
            registered: objects to be saved.
            schedule: counts from the last snapshot.
            pipeline: gets what was taken.
            ranks: connection to the other ranks; None if this process saves for itself.
            pairing: requests of snapshots of files.
            name_lock: lock on the name of the training in the repository.
            trackers: experiment trackers to which saves are logged.
        """
        self._run = run
        self._registered = registered
        self._schedule = schedule
        self._pipeline = pipeline
        self._ranks = ranks
        self._pairing = pairing
        self._name_lock = name_lock
        self._trackers = trackers
        self._prepared = self._checked_completeness = self._ranks_met = self._is_silent = False
        self._skipped: _SkippedSave | None = None
        self.step_end: BoundaryState | None = None
        """Generators and positions right after the step, at a boundary that comes with the next one."""

    @property
    def ranks(self) -> Ranks | None:
        """Connection to the other ranks; None if this process saves for itself."""
        return self._ranks

    @property
    def writes(self) -> bool:
        """True if this process writes snapshots: of what ranks have alike rank 0, of shards one rank a directory."""
        if self._ranks is None:
            return not self._is_silent
        return self._ranks.saves or (self._ranks.leads_directory and self._is_sharded)

    @property
    def _tells(self) -> bool:
        """True if this process tells callbacks how a save ended: of several ranks rank 0."""
        return self.writes if self._ranks is None else self._ranks.saves

    @property
    def is_prepared(self) -> bool:
        """True if memory for a first save was allocated, or none is needed."""
        return self._prepared

    @property
    def has_skipped(self) -> bool:
        """True if the last save that was due was skipped, and none was taken since."""
        return self._skipped is not None

    @property
    def _is_sharded(self) -> bool:
        """True if each rank has a part of the state."""
        return self._ranks is not None and are_sharded(self._registered.objects.values())

    # -- the other ranks

    def join_ranks(self, ranks: Ranks) -> None:
        """Save together with the other ranks from now on."""
        self._ranks = ranks
        self._schedule.decide_by(ranks.vote())

    def leave_ranks(self) -> None:
        """Save without the other ranks from now on: rank 0 by itself, others nothing."""
        self._is_silent = not self._tells
        self._ranks = None
        self._schedule.decide_by(None)

    def close_ranks(self) -> None:
        """Close the connection to the other ranks."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def all_at_boundary(self) -> bool:
        """Return whether the other ranks come to boundaries too."""
        # Asked until they have come once: agreements at boundaries would wait for ranks that never come.
        if self._ranks is not None and not self._ranks_met:
            with quietly("the other ranks are gone"):
                self._ranks_met = self._ranks.all_at_boundary()
            return self._ranks_met
        return True

    # -- before the first save, and after the last one

    def acquire_name(self) -> None:
        """Take the lock on the training's name, if this process writes."""
        if self.writes:
            self._name_lock.acquire()

    def release_name(self) -> None:
        """Let other processes have the name of the training."""
        self._name_lock.release()

    def skip_preparation(self) -> None:
        """Leave the memory of a first save to that save: asking the objects for their states is collective."""
        self._prepared = True

    def prepare(self) -> None:
        """Allocate memory for the first save, once the first step has given everything its size."""
        self._prepared = True
        is_sharded = self._is_sharded
        if not self.writes and not is_sharded:
            return
        # Not earlier than the first step, in which optimizers create their state.
        states = self._registered.states()
        if self._ranks is not None and is_sharded:
            self._pipeline.prepare(_gather_part(self._registered.objects, states, self._ranks))
        else:
            self._pipeline.prepare(gather(states, {}, {}))
        self._pipeline.process_messages()

    def size_in_directory(self, size_bytes: int) -> int:
        """Return how much all ranks of this directory store at a save, in turn. Collective where the state is sharded.

        Args:
            size_bytes: what this one stores.
        """
        if self._ranks is None or not self._is_sharded:
            return size_bytes
        sizes = self._ranks.exchange(size_bytes)
        return sum(int(sizes[rank]) for rank in self._ranks.shared_by)

    # -- what the ranks have of their own

    def parts_when_asked(self, place: str) -> GatheredStates:
        """Gather the ranks' states for a snapshot that the program asked for.

        Args:
            place: file and line of the call, to tell calls on several ranks apart.

        Returns:
            As `gather_parts`; None if this rank alone was asked.
        """
        if self._ranks is None:
            return None
        ranks = self._ranks
        ranks.begin_asked(self._run.step, place)
        try:
            if not self._is_sharded:
                return self._handed_in(ranks)
            if not ranks.all_asked():
                raise RankMismatch(
                    "save_snapshot must be called on every rank, because each has a part of the state"
                )
        except (RankMismatch, TooDifferent) as error:
            # Rank 0 alone still has a state to save, unless each rank has a part of it, or is there and has its own.
            if isinstance(error, PartLost):
                return RanksApart(f"what is each rank's own cannot be had: {error}")
            if self._is_sharded or isinstance(error, TooDifferent):
                return RanksApart(str(error))
            self._pipeline.outcome(str(error))
            return None
        return self._agree(ranks, may_wait=True)

    def _handed_in(self, ranks: Ranks) -> list[RankState] | None:
        """Gather the ranks' states where rank 0 may be alone, as `gather_parts` does.

        Raises:
            TooDifferent: the ranks differ in more than can be sent.
            RankMismatch: another rank cannot be reached or sent something else.
        """
        objects = self._registered.objects
        own = rank_state.own_state(objects)
        wanted: dict[int, list[str]] = {}
        try:
            parts = _decode_states(ranks.hand_in(own.message(), stays=bool(own.digests)))
            wanted = rank_state.wanted(parts or [])
        finally:
            # Also after an error: each of them waits for it.
            for rank in ranks.talks_to if ranks.saves else ():
                ranks.send(rank, wanted.get(rank, []))
        if not ranks.saves:
            for rank in ranks.talks_to:
                if keys := ranks.receive(rank):
                    ranks.send(rank, rank_state.wanted_states(objects, keys).message())
        elif parts:
            for rank in wanted:
                parts[rank] = parts[rank].with_wanted(_decode_state(ranks.receive(rank)))
        return parts

    def gather_parts(self, *, may_wait: bool, at: BoundaryState | None = None) -> GatheredStates:
        """Gather what each rank has of its own. Collective.

        Args:
            may_wait: wait for an arena to become free.
            at: generators and positions to save in place of the current ones.

        Returns:
            None if this process saves for itself. The states of all ranks on rank 0, and [] on the others.
            For a sharded state `AgreedSave` on all ranks, or [] on all if they skip this one. `RanksApart` if
            another rank has ended or they cannot agree: no snapshot is taken then, since one without that
            rank's generators and position would become the newest, and a resume from it would not be exact.
        """
        if self._ranks is None:
            return None
        # On all alike, whatever becomes of this one: they must find the next one due at the same step.
        self._schedule.begin_at(self._run.step)
        if self._is_sharded:
            return self._agree(self._ranks, may_wait=may_wait, at=at)
        ranks, objects = self._ranks, self._registered.objects
        parts: list[RankState] = []
        wanted: dict[int, list[str]] = {}
        problem = ""
        try:
            try:
                parts = _decode_states(ranks.gather(rank_state.own_state(objects, at).message())) or []
                wanted = rank_state.wanted(parts)
            except RankMismatch as error:
                problem = f"the other ranks are gone: {error}"
            except TooDifferent as error:
                problem = str(error)
            # Also after an error: the other ranks come to it.
            asked = ranks.exchange([wanted.get(rank, []) for rank in range(ranks.world_size)])[0]
            if any(asked):
                more = ranks.gather(rank_state.wanted_states(objects, asked[ranks.rank]).message())
                found = _decode_states(more) or []
                parts = [part.with_wanted(one) for part, one in zip(parts, found, strict=True)]
        except RankMismatch as error:
            problem = problem or f"the other ranks are gone: {error}"
        return RanksApart(problem) if problem else parts

    def _agree(
        self, ranks: Ranks, *, may_wait: bool, at: BoundaryState | None = None
    ) -> AgreedSave | RanksApart | list[RankState]:
        """Agree on a sharded save; [] if it is skipped."""
        client = self._pipeline.client
        if may_wait:
            self._pipeline.wait_for_arena()
        try:
            objects, states = self._registered.objects, self._registered.states()
            found = agree(
                ranks,
                client.repository,
                objects,
                states,
                is_busy=not client.can_take,
                run=self._run,
                metrics=self._schedule.reported,
                at=at,
            )
            if found is None:
                self._pipeline.count_skip(is_logged=True)
                self._skipped = _SkippedSave(self._run.step, SnapshotSpec(_AT_END), None)
            return found or []
        except (RankMismatch, TooDifferent, OSError) as error:
            return RanksApart(str(error))

    # -- snapshots

    def take_due(self, request: SnapshotSpec) -> Save | None:
        """Gather what each rank has of its own, and take a snapshot that a rule asks for. Collective.

        Returns:
            As `take`.

        Raises:
            Unsaveable: a value cannot be stored.
        """
        if request.boundary_state is None:
            request = request._replace(boundary_state=self.step_end)
        try:
            return self.take(request, self.gather_parts(may_wait=request.may_wait, at=request.boundary_state))
        except Exception as error:
            self._pipeline.not_gathered(error)
            # The program does not see the exception of a save that it did not ask for.
            if self._tells:
                self._pipeline.callbacks.notify(
                    SaveResult.failed(self._facts(request, world_size=1), str(error))
                )
            raise

    def take(self, request: SnapshotSpec, parts: GatheredStates) -> Save | None:
        """Take a snapshot.

        Returns:
            The save; None if it could not be staged, or if another rank writes.

        Raises:
            Unsaveable: a value cannot be stored.
        """
        if isinstance(parts, RanksApart):
            # Told by the rank that would have written it.
            told = self._facts(request, world_size=1) if self._tells else None
            self._pipeline.outcome(parts.problem, facts=told)
            return None
        if isinstance(parts, AgreedSave):
            with self._pipeline.guard:
                if self.writes:
                    return self._take_whole(request, parts.parts, parts)
                self._take_part(request, parts)
                return None
        # The ranks did not agree, and one rank's part alone is no snapshot.
        if self._is_sharded:
            return None
        if not self.writes:
            self._record_taken()
            return None
        with self._pipeline.guard:
            return self._take_whole(request, parts)

    def _take_part(self, request: SnapshotSpec, agreed: AgreedSave) -> None:
        """Take this rank's part of the snapshot that the writer of the directory's first rank makes."""
        assert self._ranks is not None
        began = time.monotonic()
        joint_save, self._prepared = agreed.joint_save, True
        states = self._registered.states()
        manifest = Manifest(time_ns=time.time_ns(), message="", tags=(), files=[], joint_save=joint_save)
        state = _gather_part(self._registered.objects, states, self._ranks)
        # Not beside the next step: the first rank's writer waits for this part, so it is handed over before the step.
        save = self._pipeline.stage(state, Facts(), manifest, may_wait=False, beside=False)
        if isinstance(save, NotStaged):
            # Otherwise that writer would wait for this part until its deadline.
            with quietly("the writer of the snapshot could not be told that this rank has no part"):
                reason = self._pipeline.stats.last_error or "no free arena"
                report_failure(self._pipeline.client.repository, joint_save, reason)
            return
        self._pipeline.stalled(time.monotonic() - began)
        self._record_taken()

    def _take_whole(
        self, request: SnapshotSpec, parts: list[RankState] | None, agreed: AgreedSave | None = None
    ) -> Save | None:
        """Take the state of this process, with what the other ranks have of their own."""
        began = time.monotonic()
        # Frees the arenas that the writer has returned since.
        self._pipeline.process_messages()
        self._warn_incomplete()
        self._prepared = True
        states, random = self._registered.states(), stateful.random_states()
        if request.boundary_state is not None:
            # Within an evaluation: the resumed run continues from the last boundary and evaluates again.
            states, random = states | request.boundary_state.positions, request.boundary_state.random
        values: dict[str, Any] = {"plain": list(request.plain), "random": random}
        classes = {name: stateful.optimizer_class(value) for name, value in self._registered.objects.items()}
        values["optimizers"] = {name: found for name, found in classes.items() if found}
        if self._registered.passes is not None:
            values["passes"] = self._registered.passes.state_dict() | {"given": self._run.epoch}
        if parts:
            values["ranks"] = rank_state.differing(parts)
        facts = self._facts(request, world_size=len(parts) if parts else 1)
        if agreed is not None:
            metrics = dict(agreed.metrics) | metric_floats(request.metrics)
            facts = msgspec.structs.replace(facts, run=agreed.run, metrics=metrics)
        request_pair = self._pairing.requester(request.filesystem)
        manifest = Manifest(
            time_ns=self._run.next_time_ns() if agreed is None else agreed.time_ns,
            message=facts_summary(facts),
            tags=(TAG, *job_tags(), *request.tags),
            hold_reason=request.hold,
            files=[],
            joint_save=None if agreed is None else agreed.joint_save,
            set_member=None if agreed is None else self._set_member(agreed),
            # The snapshot of the files names this one, so its id is chosen before it exists.
            id="" if request_pair is None else planned_id(),
        )
        self._run.newest_ns = manifest.time_ns
        claim = None if agreed is None else agreed.claim
        try:
            state = gather(states, request.plain, values, with_shards=agreed is not None)
            facts = msgspec.structs.replace(
                facts, size_bytes=state.size_bytes if agreed is None else agreed.size_bytes
            )
            save = self._pipeline.stage(
                state,
                facts,
                manifest,
                may_wait=request.may_wait,
                # What ranks have agreed on is handed over before they go on.
                beside=agreed is None and not request.may_wait,
                claim=claim,
                request_pair=request_pair,
            )
        finally:
            if claim is not None:
                claim.release()  # does nothing if the claim was handed over
        if save is NotStaged.SKIPPED:
            # A skipped save is not tried at every boundary: the next one is due as if it had been taken.
            self._schedule.begin_at(self._run.step)
            at_boundary = BoundaryState(random, self._registered.positions(), facts.epoch)
            again = request._replace(reason=_AT_END, boundary_state=request.boundary_state or at_boundary)
            self._skipped = _SkippedSave(self._run.step, again, parts)
        if isinstance(save, NotStaged):
            return None
        self._pipeline.stalled(time.monotonic() - began)
        self._record_taken()
        return save

    def _set_member(self, agreed: AgreedSave) -> SetMember | None:
        """Return the place of this directory's snapshot among those of all; None where there is one directory."""
        assert self._ranks is not None
        directories = self._ranks.directories
        if len(directories.groups) == 1:
            return None
        return SetMember(
            id=agreed.joint_save.token,
            name=f"{self._name_lock.name}@{self._run.step}",
            member=directories.names[directories.number_of(self._ranks.rank)],
            members=tuple(sorted(directories.names)),
        )

    def take_skipped(self, *, is_whole: bool) -> None:
        """Save what was skipped, at the end of the program. Collective where the state is sharded.

        Args:
            is_whole: whether the program is between two steps.
        """
        skipped, self._skipped = self._skipped, None
        if skipped is None:
            return
        if self._is_sharded:
            # Every rank knows of the skip, and comes here if it ends in order.
            if self._ranks is not None and is_whole and self._ranks.all_closing():
                self.take(skipped.request, self._agree(self._ranks, may_wait=False))
        elif self._run.step == skipped.step:
            self.take(skipped.request, skipped.parts)
        elif self._ranks is None and is_whole:
            # Steps were made since: the state of now is the better one.
            self.take(SnapshotSpec(_AT_END), None)
        # `_record_taken` has not been called, or another skip was noted.
        if self._skipped is not None or self._pipeline.changed:
            self._skipped = None
            log.warning(
                "ciuic: the snapshot that was due at step %d was skipped, and could not be taken at the end",
                skipped.step,
            )

    def wait_durable(self, save: Save | None, seconds: float) -> None:
        """Wait for the end of a save that the program asked for, durable or failed, on all ranks."""
        if save is not None:
            save.wait()
        if self._ranks is not None:
            with quietly("the other ranks are gone"):
                self._ranks.durable(seconds, in_all_directories=self._is_sharded)

    def _record_taken(self) -> None:
        """Record that a snapshot of this boundary was taken, by this rank or by rank 0."""
        self._pipeline.state_saved()
        self._skipped = None
        # Of several ranks all count from where they have gathered: others may not have been asked, or do not know the step
        # that a framework names on rank 0 alone, and must find the next one due at the same step.
        self._schedule.taken(self._run.step if self._ranks is None else None)

    def _facts(self, request: SnapshotSpec, world_size: int) -> Facts:
        """Return the content of `snapshot.json`."""
        epoch = request.epoch if request.boundary_state is None else request.boundary_state.epoch
        return Facts(
            step=self._run.step,
            epoch=self._registered.epoch(self._run.epoch) if epoch is None else epoch,
            metrics=self._schedule.reported | metric_floats(request.metrics),
            reason=request.reason,
            objects=tuple(self._registered.objects),
            run=self._run.id,
            trackers=self._trackers.runs(),
            framework=framework_versions(),
            world_size=world_size,
        )

    def _warn_incomplete(self) -> None:
        """Warn once of what a resume would miss, and take the lock on the training's name."""
        if not self._checked_completeness:
            self._checked_completeness = True
            # With the first save, or `resume`: a process that only loads is no second training.
            self._name_lock.acquire()
            for note in unregistered(self._registered.objects, has_position=self._registered.has_position):
                log.warning("ciuic: a resume would not be exact: %s", note)
