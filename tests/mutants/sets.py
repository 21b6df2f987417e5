"""Faults in sets of snapshots of several hosts at one instant."""

from __future__ import annotations

from mutants.model import Mutant

TESTS = (
    "tests/unit/remote/test_sets_of_hosts.py",
    "tests/property/test_sets_of_hosts.py",
    "tests/property/test_reading_of_sets.py",
    "tests/unit/daemon/snapshots/test_held_snapshots.py",
    "tests/e2e/test_sets_of_hosts.py",
)

MUTANTS = (
    Mutant(
        "decision_about_other_set",
        "ciuic/remote/sets.py",
        '            if mark.decision == "cut" and self._set_id is not None and mark.set == self._set_id\n',
        '            if mark.decision == "cut" and self._set_id is not None\n',
        "Hosts of two meetings are cut at two instants as one set.",
        (
            "tests/unit/remote/test_marks_of_other_sets.py",
            "tests/unit/remote/test_sets_of_hosts.py",
            "tests/property/test_sets_of_hosts.py",
            *TESTS,
        ),
    ),
    Mutant(
        "ready_in_other_set",
        "ciuic/remote/sets.py",
        '            if found is not None and (mark == "here" or found.set == self._set_id):\n',
        "            if found is not None:\n",
        "A set is cut while a host is not held.",
        (
            "tests/unit/remote/test_marks_of_other_sets.py",
            "tests/unit/remote/test_sets_of_hosts.py",
            "tests/property/test_sets_of_hosts.py",
            *TESTS,
        ),
    ),
    Mutant(
        "go_of_earlier_meeting",
        "ciuic/remote/sets.py",
        "                if len(found.here) == len(self._members) and found.here[self._turn] == self._nonce:\n",
        "                if len(found.here) == len(self._members):\n",
        "A command goes on with the set of one that was killed.",
        ("tests/unit/remote/test_sets_of_hosts.py", "tests/property/test_sets_of_hosts.py", *TESTS),
    ),
    Mutant(
        "unread_decision_is_none",
        "ciuic/remote/sets.py",
        '        if decision is None and self._patiently(lambda: self._decide(plan, "abort")) == "cut":\n',
        "        if decision is None and self._set_id is None:\n",
        "A host that is missing in a set reports that nobody was cut.",
        (
            "tests/unit/remote/test_marks_of_other_sets.py",
            "tests/unit/remote/test_sets_of_hosts.py",
            "tests/property/test_sets_of_hosts.py",
            *TESTS,
        ),
    ),
    Mutant(
        "running_sets_tidied",
        "ciuic/remote/sets.py",
        "if info.modified_ns < newest_ns - _OLD_NS]",
        "if info.modified_ns < newest_ns]",
        "A host tidies the marks of a set that is being cut.",
        ("tests/unit/remote/test_sets_of_hosts.py", *TESTS),
    ),
    Mutant(
        "set_of_other_hosts",
        "ciuic/remote/sets.py",
        "                if plan.name != request.name or plan.members != self._members:\n",
        "                if plan.name != request.name:\n",
        "A set lacks hosts that one of the commands names.",
        ("tests/unit/remote/test_sets_of_hosts.py", *TESTS),
    ),
)
