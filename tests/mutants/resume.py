"""Faults in what a training resumes from."""

from __future__ import annotations

from mutants.model import Mutant

TESTS = (
    "tests/unit/training/remote",
    "tests/unit/training/state",
    "tests/unit/training/format",
    "tests/unit/training/writer/test_coded_damage.py",
    "tests/unit/training/writer/test_retention_by_the_writer.py",
    "tests/property/test_training_preservation.py",
    "tests/crash/test_training_kill.py",
    "tests/e2e/test_training_remote.py",
    "tests/e2e/test_training_resumes.py",
    "tests/smoke/test_training_loading.py",
    "tests/e2e/test_training_resume_refuses_misfits.py",
)

MUTANTS = (
    Mutant(
        "older_state_of_silent_remote",
        "ciuic/training/loading.py",
        ("            except (RemoteUnreachable, RemoteRefused):\n                raise\n"),
        ("            except AssertionError:\n                raise\n"),
        "A run goes on from an older state because a remote did not answer.",
        ("tests/unit/training/remote/test_resume_beside_remotes.py", *TESTS),
    ),
    Mutant(
        "older_state_of_silent_remote_on_ranks",
        "ciuic/training/loading.py",
        "        except (OSError, RemoteUnreachable, RemoteRefused) as error:\n",
        "        except OSError as error:\n",
        "Ranks go on from an older state because a remote did not answer.",
        ("tests/unit/training/remote/test_resume_beside_remotes.py", *TESTS),
    ),
    Mutant(
        "new_run_beside_silent_remote",
        "ciuic/training/loading.py",
        ("        if not here:\n            raise\n"),
        "",
        "A run begins anew because a remote did not answer.",
        ("tests/unit/training/remote/test_resume_beside_remotes.py", *TESTS),
    ),
    Mutant(
        "new_run_beside_damaged_remote",
        "ciuic/training/loading.py",
        ("        if state is None and damage is not None:\n            raise damage\n"),
        "",
        "A run begins anew where all states on its remote are damaged.",
        ("tests/unit/training/remote/test_resume_beside_remotes.py", *TESTS),
    ),
    Mutant(
        "damage_unmarked",
        "ciuic/training/loading.py",
        ("    _mark_damaged(save_dir, loaded.passed_over)\n    return state\n\n\ndef _is_wanted"),
        ("    return state\n\n\ndef _is_wanted"),
        "Every later state shares a chunk that is damaged.",
        (
            "tests/unit/training/writer/test_coded_damage.py",
            "tests/property/test_training_preservation.py",
            *TESTS,
        ),
    ),
    Mutant(
        "half_of_objects_restored",
        "ciuic/training/loading.py",
        ("        undo.restore()\n        raise\n"),
        "        raise\n",
        "After a refused state the model is of the snapshot and the optimizer is not.",
        ("tests/unit/training/state", *TESTS),
    ),
    Mutant(
        "remote_state_against_oldest",
        "ciuic/training/loading.py",
        "one.time_ns > here[0].time_ns]",
        "one.time_ns > here[-1].time_ns]",
        "A run goes on from a state of the remote that is older than its own.",
        ("tests/unit/training/remote/test_resume_beside_remotes.py", *TESTS),
    ),
    Mutant(
        "damaged_here_hides_remote",
        "ciuic/training/loading.py",
        ("            if not others:\n                raise\n"),
        "            raise\n",
        "A run ends though its remote has the state that is damaged here.",
        ("tests/unit/training/remote/test_resume_beside_remotes.py", *TESTS),
    ),
)
