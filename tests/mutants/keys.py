"""Faults in keys of a remote, and the seals of its objects."""

from __future__ import annotations

from mutants.model import Mutant

TESTS = (
    "tests/unit/remote/test_key_slot_bytes.py",
    "tests/unit/remote/test_slot_secret.py",
    "tests/unit/remote/test_passphrase_key.py",
    "tests/unit/remote/test_recovery_key.py",
    "tests/unit/remote/access/test_key_slots_in_a_remote.py",
    "tests/format/test_golden_remote.py",
    "tests/property/test_remote_seals.py",
    "tests/security/test_bucket_writer.py",
    "tests/e2e/test_cli_remote.py",
)

MUTANTS = (
    Mutant(
        "seal_without_name",
        "ciuic/remote/sealing/sealer.py",
        "        return envelope + self.remote_id + name.encode()\n",
        "        return envelope + self.remote_id\n",
        "Whoever writes to the bucket puts one object in the place of another.",
        ("tests/property/test_remote_seals.py", *TESTS),
    ),
    Mutant(
        "slot_under_other_name",
        "ciuic/remote/sealing/key_slots.py",
        "    if found.slot != slot:\n",
        "    if not found.slot:\n",
        "Removing a slot leaves the key that was exchanged with it.",
        ("tests/unit/remote/test_key_slot_bytes.py", *TESTS),
    ),
    Mutant(
        "group_reads_key_file",
        "ciuic/remote/sealing/key_slots.py",
        "        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):\n",
        "        if status.st_mode & stat.S_IRWXO:\n",
        "A key that the group reads is taken without a word.",
        ("tests/unit/remote/test_slot_secret.py", *TESTS),
    ),
    Mutant(
        "key_file_of_any_owner",
        "ciuic/remote/sealing/key_slots.py",
        "        if status.st_uid not in (0, os.geteuid()):\n",
        "        if status.st_uid < 0:\n",
        "A user gives root a key that the user knows.",
        ("tests/unit/remote/test_slot_secret.py", *TESTS),
    ),
    Mutant(
        "passphrase_of_one_keyboard",
        "ciuic/remote/sealing/key_slots.py",
        'unicodedata.normalize("NFC", passphrase).encode()',
        "passphrase.encode()",
        "A passphrase with an umlaut does not open the remote from another machine.",
        ("tests/unit/remote/test_slot_secret.py", "tests/unit/remote/test_key_slot_bytes.py", *TESTS),
    ),
    Mutant(
        "first_slot_decides",
        "ciuic/remote/sealing/key_slots.py",
        ("        except WrongKey:\n            tried.append(slot.slot)\n    if not tried"),
        (
            "        except WrongKey:\n"
            "            tried.append(slot.slot)\n"
            "            break\n"
            "    if not tried"
        ),
        "Only the first of several passphrases opens the remote.",
        (
            "tests/unit/remote/test_key_slot_bytes.py",
            "tests/unit/remote/access/test_key_slots_in_a_remote.py",
            *TESTS,
        ),
    ),
    Mutant(
        "work_of_slot_unlimited",
        "ciuic/remote/sealing/key_slots.py",
        "self.kdf.memory_kib * self.kdf.passes > MAX_WORK_KIB",
        "self.kdf.memory_kib > MAX_WORK_KIB",
        "A slot that an attacker has stored keeps each host busy for minutes.",
        ("tests/unit/remote/test_key_slot_bytes.py", *TESTS),
    ),
    Mutant(
        "work_of_all_slots_unlimited",
        "ciuic/remote/sealing/key_slots.py",
        "        if spent_kib and spent_kib + work_kib(slot) > MAX_PASSPHRASE_WORK_KIB:\n",
        "        if spent_kib and work_kib(slot) > MAX_PASSPHRASE_WORK_KIB:\n",
        "Slots that an attacker has stored keep each host busy for hours.",
        (
            "tests/unit/remote/test_key_slot_bytes.py",
            "tests/unit/remote/access/test_key_slots_in_a_remote.py",
            *TESTS,
        ),
    ),
    Mutant(
        "key_command_leaves_children",
        "ciuic/remote/sealing/key_slots.py",
        "        os.killpg(process.pid, signal.SIGKILL)\n",
        "        process.kill()\n",
        "What a key command started goes on after its limit.",
        ("tests/unit/remote/test_slot_secret.py", *TESTS),
    ),
)
