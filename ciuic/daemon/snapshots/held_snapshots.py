"""Snapshots that are held first and cut when somebody decides, so that several hosts can be cut at one instant.

The daemon has no network: a command on its control socket asks for the hold, meets the other hosts
(ciuic.remote.sets), and decides.

Guarantees: a hold ends with its decision or at its limit, whatever its command does; its worker ends it by
itself should this daemon hang or die (`cut.HeldCut`). A token decides one hold, once. A second hold waits for
the first, as every cut does. Belongs to the trio thread.
"""

from __future__ import annotations

import secrets

import structlog
import trio

from ciuic.daemon.snapshots.cut import HeldCut
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.daemon.snapshots.requests import Snapshots
from ciuic.errors import CiuicError, NotFound, Unreachable, UsageError
from ciuic.protocol.control_types import MAX_HOLD_LIMIT_SECONDS, HoldRequest, HoldState, SnapshotState
from ciuic.repository.snapshot_format import set_member_problem

log = structlog.get_logger(__name__)


class _Hold:
    """A hold and what became of it."""

    def __init__(self, cut: HeldCut) -> None:
        self.cut = cut
        self.finished = trio.Event()
        self.pending: PendingSnapshot | None = None
        self.failure: CiuicError | None = None

    @property
    def outcome(self) -> PendingSnapshot:
        """The snapshot; raises why there is none."""
        if self.pending is None:
            failure = self.failure or CiuicError("the hold was released without a cut")
            # A new exception for each request, as in `requests._SharedCut`.
            raise failure.anew()
        return self.pending


class HeldSnapshots:
    """The holds of one daemon; `run` is the task in which they live."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._nursery: trio.Nursery | None = None
        self._holds: dict[str, _Hold] = {}

    async def run(self) -> None:
        """Let holds be asked for, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def hold(self, request: HoldRequest) -> HoldState:
        """Hold the roots, and return when every one is held.

        Raises:
            UsageError: the limit or the place in the set is none.
            Unreachable: the daemon is starting or stopping.
            CiuicError: as `Snapshots.take`.
        """
        if not 0 < request.limit_seconds <= MAX_HOLD_LIMIT_SECONDS:
            raise UsageError(
                f"the limit of a hold must be above 0 and at most {MAX_HOLD_LIMIT_SECONDS:g} s, got {request.limit_seconds:g} s"
            )
        if problem := set_member_problem(request.set_member):
            raise UsageError(problem)
        if self._nursery is None:
            raise Unreachable("the daemon is starting or stopping", hint="try again in a moment")
        hold = _Hold(HeldCut(request.limit_seconds, request.set_member, flushed=request.flushed))
        token = secrets.token_hex(16)
        self._nursery.start_soon(self._take, token, hold, request)
        await hold.cut.settled.wait()
        if hold.finished.is_set():
            _ = hold.outcome
        return HoldState(token=token)

    async def _take(self, token: str, hold: _Hold, request: HoldRequest) -> None:
        self._holds[token] = hold
        try:
            hold.pending = await self._snapshots.take(request.snapshot, held=hold.cut)
        except CiuicError as error:
            hold.failure = error
        except Exception:
            log.exception("held_cut_defect")
            hold.failure = CiuicError("internal error in the daemon", hint="its log has the details")
        finally:
            del self._holds[token]
            # Before `settled`: who waits for that looks whether the hold has ended.
            hold.finished.set()
            hold.cut.settled.set()

    async def decide(self, token: str, *, cut: bool) -> SnapshotState | None:
        """Cut what is held, and return the snapshot when its id is final; or release it.

        Raises:
            NotFound: no such hold is in force.
            CiuicError: nothing was cut.
        """
        hold = self._holds.get(token)
        if hold is None:
            raise NotFound("no such hold is in force: it was decided, or ended at its limit")
        hold.cut.decide(cut=cut)
        await hold.finished.wait()
        return hold.outcome.state if cut else None
