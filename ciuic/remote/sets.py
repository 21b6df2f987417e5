"""Sets: snapshots of several hosts at one instant, agreed on over the objects of a remote.

One command runs on each host. They meet at a plan (`here`), which holds nobody; when all are there, each holds
its roots, says `ready`, and waits for the decision: `cut`, created by the command that has seen every `ready`,
or `abort`, created by whoever waited too long. Whichever stands first is valid for all.

Guarantees:

* All cuts with the id of a set contain one common instant. Each lies within an unbroken hold that began before
  `ready` was created, and after `cut` stood, which stood after every `ready`. What cannot be cut within its hold
  gets no snapshot (`Daemon.hold`).
* No host is held while it waits for another to appear, nor longer than the limit of the plan or its own.
* No clock of one host is compared with another's, and no LIST is relied on.
* Marks of an earlier meeting that somebody puts back count for nothing: the id of a set depends on a nonce of each command
  that took part, and `ready` and `cut` name it.

Leaves to others: the hold itself (the daemon), whether a set is whole (it is where every member has a snapshot
with its id), what is captured and uploaded.

References:
    docs/remote-format.md, section 12; docs/decisions/sets.md
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Literal, NamedTuple, Protocol, TypeVar

from ciuic.errors import CiuicError, Damaged, UsageError
from ciuic.remote.documents import (
    MAX_SET_BYTES,
    StoredSetMark,
    StoredSetPlan,
    decode_set_object,
    encode_set_object,
    read_object,
)
from ciuic.remote.object_names import (
    MAX_ATTEMPT,
    SET_PLANS_PREFIX,
    SETS_PREFIX,
    SetMark,
    new_hex_id,
    set_mark_name,
    set_plan_name,
)
from ciuic.remote.objects.model import NoSuchObject, Objects, RemoteRefused, RemoteUnreachable, UntrustedStore
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository.snapshot_format import set_member_problem
from ciuic.types import SetMember

DEFAULT_HOLD_LIMIT_SECONDS: Final = 2.0
DEFAULT_WAIT_SECONDS: Final = 60.0
MAX_WAIT_SECONDS: Final = 3600.0
_MAX_HELD_ATTEMPTS: Final = 3
# Time for the hosts to meet again after an attempt that held them in vain.
_MEET_AGAIN_SECONDS: Final = 10.0
# Nobody is held while hosts wait for each other, and the store is spared.
_MEETING_PAUSE_SECONDS: Final = 0.05
# Time between the sight of all members and `go`, in which the others see them, too, and begin to look for `go` as often
# as held hosts do: who sees it late is waited for under the hold.
_ALL_KNOW_SECONDS: Final = 0.15
# While all are held. Who counts asks so often; the others together four times as often, however many they are: 16
# that asked every 10 ms kept a small store so busy that they were held for longer.
_HELD_PAUSE_SECONDS: Final = 0.01
_ASKING_TOGETHER: Final = 4
# Parts of the limit after which the held hosts, one after the other, decide to abort, so that all learn of it before
# their limits.
_ABORT_AFTER: Final = (0.6, 0.9)
# Where each host could create an object, they try one after the other, this long apart, the last within a second:
# SeaweedFS let 16 hosts that created one name at once wait for each other in steps of a second.
_TURN_SECONDS: Final = 0.1
_LONGEST_TURN_SECONDS: Final = 1.0
# Age by the store's clock at which the objects of a set are removed: no command waits for so long.
_OLD_NS: Final = 24 * 3600 * 10**9
_NAMES_SHOWN: Final = 8

_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)
_Document = TypeVar("_Document", StoredSetPlan, StoredSetMark)
_Decision = Literal["cut", "abort"]


class SetNotCut(CiuicError):
    """Error: the hosts did not meet, or could not all be held at once. No host has a snapshot of the set."""


class SetIncomplete(CiuicError):
    """Error: the set was decided to be cut, and this host could not be cut within its hold."""


class Hold(Protocol[_Result_co]):
    """A hold of this host's roots that is in force, or was until its limit."""

    def cut(self) -> _Result_co:
        """Cut within the hold, and release; raise CiuicError, with nothing cut, where the hold has ended."""

    def release(self) -> None:
        """End the hold without a cut; raise CiuicError where it has ended."""


class Daemon(Protocol[_Result_co]):
    """This host's daemon."""

    def flush(self) -> bool:
        """Write back the kernel's caches; return whether that is complete."""

    def hold(self, member: SetMember, limit_seconds: float, *, flushed: bool) -> Hold[_Result_co]:
        """Hold all roots, and return when no changing operation is in flight. The hold ends at its limit by itself."""


class SetRequest(NamedTuple):
    """What one host's command is asked for."""

    name: str
    members: tuple[str, ...]
    member: str
    """The one of `members` that this host is."""
    hold_limit_seconds: float = DEFAULT_HOLD_LIMIT_SECONDS
    wait_seconds: float = DEFAULT_WAIT_SECONDS
    """Longest wait for the other hosts to appear."""

    def check(self) -> None:
        """Raise UsageError unless such a set can be."""
        if len(set(self.members)) < len(self.members):
            twice = sorted(name for name in set(self.members) if self.members.count(name) > 1)
            raise UsageError(f"each host must be named once, got twice: {', '.join(twice)}")
        if self.member not in self.members:
            raise UsageError(
                f"this host, {self.member}, is none of {_shown(self.members)}",
                hint="name it among the hosts, or say which of them it is",
            )
        if problem := set_member_problem(self.place("0" * 32)):
            raise UsageError(problem)
        if not self.hold_limit_seconds > 0 or not 0 <= self.wait_seconds <= MAX_WAIT_SECONDS:
            raise UsageError(
                f"a hold must have a limit above 0, and a wait one of at most {MAX_WAIT_SECONDS:g} s, "
                f"got {self.hold_limit_seconds:g} s and {self.wait_seconds:g} s"
            )

    def place(self, set_id: str) -> SetMember:
        """Return the place of this host's snapshot in the set of this id."""
        return SetMember(id=set_id, name=self.name, member=self.member, members=tuple(sorted(self.members)))


class SetMeeting:
    """One host's part in cutting a set. For one thread.

    Args:
        objects: objects of the remote, whose requests are not repeated for long.
        sealer: seals of the remote.
        request: what is asked for.
        clock: monotonic clock.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        request: SetRequest,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        request.check()
        self._objects = objects
        self._sealer = sealer
        self._request = request
        self._members = tuple(sorted(request.members))
        self._turn = self._members.index(request.member)
        self._turn_seconds = min(
            self._turn * _TURN_SECONDS, _LONGEST_TURN_SECONDS * self._turn / len(self._members)
        )
        self._clock = clock
        self._sleep = sleep
        self._nonce = new_hex_id()
        self._waits_until = 0.0
        self._searches_until = 0.0
        self._attempt = 1
        self._plan: StoredSetPlan | None = None
        self._here: dict[str, str] = {}
        """Nonces of the commands that have come, by member."""
        self._set_id: str | None = None
        """Id of the set that is to be cut; None until all are here."""

    def take(self, daemon: Daemon[_Result]) -> _Result:
        """Take part until the set is cut, and return what the daemon returned for this host's snapshot.

        Raises:
            UsageError: the set was cut already, or another host was asked for another set of this name.
            SetNotCut: no host has a snapshot of the set.
            SetIncomplete: other hosts have one.
            RemoteUnreachable, RemoteRefused: the remote could not be used.
            CiuicError: this host's daemon could not flush or hold.
        """
        flushed = daemon.flush()
        self._waits_until = self._clock() + self._request.wait_seconds
        # Attempts that are decided take no member's time, and a member that forges them may make thousands.
        self._searches_until = self._clock() + max(self._request.wait_seconds, _MEET_AGAIN_SECONDS)
        missing: Sequence[str] = ()
        for _ in range(_MAX_HELD_ATTEMPTS):
            plan, counts = self._meet()
            cut = self._hold(daemon, plan, counts=counts, flushed=flushed)
            if cut is not None:
                if counts:
                    # A host that may not delete leaves it to `prune --remote`.
                    with suppress(CiuicError):
                        remove_old_sets(self._objects)
                return cut[0]
            missing = self._not_ready(plan)
            again_seconds = min(self._request.wait_seconds, _MEET_AGAIN_SECONDS)
            self._waits_until = max(self._waits_until, self._clock() + again_seconds)
        what = (
            f"not held in time: {_shown(missing)}"
            if missing
            else "all were held, and not decided within the limit"
        )
        raise SetNotCut(
            f"the set {self._request.name!r} was not cut in {_MAX_HELD_ATTEMPTS} attempts; {what}",
            hint="see ciuic status there; a longer --hold-limit gives slow stores and hosts more time",
        )

    def give_up(self) -> None:
        """Tell the others that this host takes no part any more: a command that is interrupted. Best effort."""
        if self._plan is not None:
            with suppress(CiuicError):
                self._decide(self._plan, "abort")

    # -- meeting, in which nobody is held

    def _meet(self) -> tuple[StoredSetPlan, bool]:
        """Return a plan for which all members are here, and whether this command counts who is ready."""
        clashes = 0
        while True:
            plan = self._plan = self._patiently(self._join)
            self._here, self._set_id = {}, None
            if self._patiently(partial(self._is_mine, self._mark(plan, "here", self._request.member))):
                go = self._until_all_here(plan)
                if go is not None:
                    return plan, go.by == self._nonce
            else:
                # Left behind by a command that was killed, as a rule.
                clashes += 1
                if clashes > _MAX_HELD_ATTEMPTS:
                    raise SetNotCut(
                        f"another command takes part in the set {self._request.name!r} as {self._request.member}",
                        hint="give each host a name of its own, and start one command on it",
                    )
                self._patiently(partial(self._decide, plan, "abort"))
            self._attempt += 1

    def _join(self) -> StoredSetPlan:
        """Return the plan of the first attempt that is not decided; make it where there is none."""
        request, hidden = self._request, self._sealer.hide(f"set {self._request.name}")
        had_turn = False
        while self._attempt <= MAX_ATTEMPT:
            if self._clock() > max(self._searches_until, self._waits_until):
                raise SetNotCut(
                    f"the set {request.name!r} was not cut, and no host is held: {self._attempt - 1} attempts were given up",
                    hint="choose another name",
                )
            name = set_plan_name(hidden, self._attempt)
            plan = self._read(name, StoredSetPlan)
            if plan is None and not had_turn:
                self._sleep(self._turn_seconds)
                had_turn = True
                continue
            if plan is None:
                own = StoredSetPlan(
                    id=new_hex_id(),
                    name=request.name,
                    members=self._members,
                    hold_limit_seconds=request.hold_limit_seconds,
                )
                if self._create(name, own):
                    return own
                self._sleep(_HELD_PAUSE_SECONDS)
                continue
            decision = self._read(self._mark(plan, "decision"), StoredSetMark)
            if decision is not None and decision.decision == "cut":
                raise UsageError(
                    f"there is a set {request.name!r} already",
                    hint="choose another name for each set, such as one with the date",
                )
            if decision is None:
                if plan.name != request.name or plan.members != self._members:
                    raise UsageError(
                        f"another host was asked for the set {request.name!r} of {_shown(plan.members)}, "
                        f"this one for {_shown(self._members)}",
                        hint="give all hosts the same name and hosts; another name, if that command was killed",
                    )
                return plan
            self._attempt += 1
        raise UsageError(
            f"the set {request.name!r} was tried {MAX_ATTEMPT} times", hint="choose another name"
        )

    def _until_all_here(self, plan: StoredSetPlan) -> StoredSetMark | None:
        """Return `go`, which stands when all members are here; None where the attempt was given up."""
        missing, go, had_turn = list(self._members), self._mark(plan, "go"), False
        while True:
            given_up = self._patiently(lambda: self._read(self._mark(plan, "decision"), StoredSetMark))
            if given_up is not None:
                if given_up.missing:
                    # Who gave up has ended: a further attempt would wait for it in vain.
                    raise self._not_met(given_up.missing)
                return None
            found = self._patiently(lambda: self._read(go, StoredSetMark))
            if found is not None:
                if len(found.here) == len(self._members) and found.here[self._turn] == self._nonce:
                    self._set_id = _set_id(plan, found.here)
                    return found
                # Of an earlier meeting: its marks were removed, and this one was put back.
                self._patiently(partial(self._decide, plan, "abort"))
                return None
            self._patiently(lambda: self._strike_out(plan, "here", missing))
            if not missing:
                if had_turn:
                    here = tuple(self._here[member] for member in self._members)
                    self._patiently(partial(self._create, go, StoredSetMark(by=self._nonce, here=here)))
                else:
                    self._await_turn(go)
                had_turn = True
                continue
            if self._clock() >= self._waits_until:
                self._strike_out(plan, "here", missing, all_of_them=True)
                if not missing:
                    continue
                # What this command has left would be counted. Who came just now is in the next attempt.
                self._decide(plan, "abort", missing)
                raise self._not_met(missing)
            self._sleep(_MEETING_PAUSE_SECONDS)

    def _await_turn(self, name: str) -> None:
        """Return when it is this host's turn to create a mark, or somebody has created it."""
        until = self._clock() + _ALL_KNOW_SECONDS + self._turn_seconds
        while self._clock() < until:
            with suppress(RemoteUnreachable, Damaged):
                if self._read(name, StoredSetMark) is not None:
                    return
            self._sleep(_HELD_PAUSE_SECONDS)

    def _not_met(self, missing: Sequence[str]) -> SetNotCut:
        return SetNotCut(
            f"the set {self._request.name!r} was not cut, and no host is held: "
            f"within the time to wait, {_shown(missing)} did not come",
            hint="start the command on every host, with the same --set and --hosts",
        )

    # -- the hold

    def _hold(
        self, daemon: Daemon[_Result], plan: StoredSetPlan, *, counts: bool, flushed: bool
    ) -> tuple[_Result] | None:
        """Hold, and cut when that is decided; None where it is decided not to."""
        began = self._clock()
        assert self._set_id is not None
        try:
            hold = daemon.hold(self._request.place(self._set_id), self._limit_seconds(plan), flushed=flushed)
        except CiuicError:
            self.give_up()
            raise
        decision: _Decision | None = None
        try:
            decision = self._agree(plan, began, counts=counts)
        finally:
            # Also where this command is interrupted: a decision that it does not know lets it cut nothing.
            if decision != "cut":
                with suppress(CiuicError):
                    hold.release()
        if decision == "cut":
            try:
                return (hold.cut(),)
            except CiuicError as error:
                raise self._left_out(error.message) from error
        if decision is None and self._patiently(lambda: self._decide(plan, "abort")) == "cut":
            raise self._left_out("the decision could not be read while it was held")
        self._attempt += 1
        return None

    def _limit_seconds(self, plan: StoredSetPlan) -> float:
        """Return for how long this host is held at most: no other host prolongs what this one was asked for."""
        return min(plan.hold_limit_seconds, self._request.hold_limit_seconds)

    def _left_out(self, reason: str) -> SetIncomplete:
        return SetIncomplete(
            f"the set {self._request.name!r} was cut, but not on this host: {reason}",
            hint="other hosts have snapshots of it, and it stays incomplete: cut another one",
        )

    def _agree(self, plan: StoredSetPlan, began: float, *, counts: bool) -> _Decision | None:
        """Say that this host is held, and return what is decided; None where that cannot be read within the limit.

        The store's errors are only lost time here.
        """
        pause_seconds = _HELD_PAUSE_SECONDS * (
            1 if counts else max(1.0, len(self._members) / _ASKING_TOGETHER)
        )
        first, last = _ABORT_AFTER
        # Who counts is the first to know, and the others abort where it does not answer.
        share = first if counts else first + (last - first) * (self._turn + 1) / len(self._members)
        limit_seconds = self._limit_seconds(plan)
        patience_seconds = share * limit_seconds
        says_ready = False
        unready = list(self._members)
        ready = self._mark(plan, "ready", self._request.member)
        while (held_seconds := self._clock() - began) < limit_seconds:
            with suppress(RemoteUnreachable, RemoteRefused, Damaged):
                if not says_ready:
                    says_ready = self._is_mine(ready)
                decision = self._read(self._mark(plan, "decision"), StoredSetMark)
                if decision is not None:
                    # Without this command's `ready` nobody could decide to cut.
                    return self._decided(decision) if says_ready else None
                if counts and says_ready:
                    self._strike_out(plan, "ready", unready)
                    if not unready:
                        return self._decide(plan, "cut")
                if held_seconds >= patience_seconds:
                    return self._decide(plan, "abort")
            self._sleep(pause_seconds)
        return None

    def _decide(self, plan: StoredSetPlan, wanted: _Decision, missing: Sequence[str] = ()) -> _Decision:
        """Decide, and return what stands."""
        name = self._mark(plan, "decision")
        mark = StoredSetMark(
            by=self._nonce,
            decision=wanted,
            missing=tuple(missing),
            set=self._set_id if wanted == "cut" else None,
        )
        if self._create(name, mark):
            return wanted
        found = self._read(name, StoredSetMark)
        if found is None:
            # A store that refuses the name and does not have it; asked again by the caller.
            raise RemoteUnreachable(f"{name} cannot be created, and is not there")
        return self._decided(found)

    def _decided(self, mark: StoredSetMark) -> _Decision:
        # A decision without a word was never written by this program; one about another set counts for nothing here.
        return (
            "cut"
            if mark.decision == "cut" and self._set_id is not None and mark.set == self._set_id
            else "abort"
        )

    def _not_ready(self, plan: StoredSetPlan) -> Sequence[str]:
        unready = list(self._members)
        with suppress(CiuicError):
            self._strike_out(plan, "ready", unready, all_of_them=True)
        return unready

    # -- objects

    def _strike_out(
        self, plan: StoredSetPlan, mark: SetMark, missing: list[str], *, all_of_them: bool = False
    ) -> None:
        """Remove the members that have such a mark from the list, up to the first that has none."""
        for member in list(missing):
            # Read and not listed: a listing may be late, and a store could name what nobody has sealed.
            found = self._read(self._mark(plan, mark, member), StoredSetMark)
            if found is not None and (mark == "here" or found.set == self._set_id):
                if mark == "here":
                    self._here[member] = found.by
                missing.remove(member)
            elif not all_of_them:
                return

    def _is_mine(self, name: str) -> bool:
        """Create a mark, and return whether it is this command's."""
        if self._create(name, self._says()):
            return True
        found = self._read(name, StoredSetMark)
        return found is not None and found.by == self._nonce

    def _mark(self, plan: StoredSetPlan, mark: SetMark, member: str = "") -> str:
        return set_mark_name(plan.id, mark, self._sealer.hide(f"member {plan.id} {member}") if member else "")

    def _says(self) -> StoredSetMark:
        return StoredSetMark(by=self._nonce, set=self._set_id)

    def _create(self, name: str, content: StoredSetPlan | StoredSetMark) -> bool:
        return self._objects.create(name, encode_set_object(self._sealer, name, content))

    def _read(self, name: str, kind: type[_Document]) -> _Document | None:
        try:
            data = read_object(self._objects, name, MAX_SET_BYTES)
        except NoSuchObject:
            return None
        return decode_set_object(self._sealer, name, data, kind)

    def _patiently(self, request: Callable[[], _Result]) -> _Result:
        """Repeat a request that the store does not answer, for as long as other hosts are waited for."""
        while True:
            try:
                return request()
            except UntrustedStore:
                raise
            except (RemoteUnreachable, Damaged):
                if self._clock() >= self._waits_until:
                    raise
            self._sleep(_MEETING_PAUSE_SECONDS)


def remove_old_sets(objects: Objects) -> int:
    """Remove what sets left a day before the newest object of one, by the store's clock; return the number of objects.

    Raises:
        CiuicError: the store could not be used; what is left is removed by a later call.
    """
    infos = list(objects.list(SETS_PREFIX))
    newest_ns = max((info.modified_ns for info in infos), default=0)
    old = [info.name for info in infos if info.modified_ns < newest_ns - _OLD_NS]
    # The plans first, so that nobody joins an attempt whose decision is gone.
    plans = [name for name in old if name.startswith(SET_PLANS_PREFIX)]
    for names in (plans, [name for name in old if not name.startswith(SET_PLANS_PREFIX)]):
        if names:
            objects.delete(names)
    return len(old)


def _set_id(plan: StoredSetPlan, here: Sequence[str]) -> str:
    """Return the id of the set that commands with these nonces cut."""
    return hashlib.blake2b("".join((plan.id, *here)).encode(), digest_size=16).hexdigest()


def _shown(members: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(members) - _NAMES_SHOWN
    return ", ".join(members[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
