"""Results of training scripts that run_script.py runs and kills.

A lost host is one that another one takes over from, for scripts that get a URL and a key and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from support.until import until
from support.warm_python import WarmPython

from ciuic.protocol.stored_remotely import read_record
from ciuic.remote.sealing.key_slots import make_key_file
from ciuic.repository import Repository
from ciuic.training.remote.uploads import state_dir


def take_over(host: str, remote: str) -> str:
    """Have this process use the directories of a host alone, once others have uploaded; return the remote's URL.

    Args:
        host: Directory of the host, which is new.
        remote: Directory of the remote. Key and list of hosts are beside it.
    """
    key, hosts = f"{remote}.key", Path(f"{remote}.hosts")
    if not os.path.exists(key):
        make_key_file(key)
    if hosts.exists():
        lose_last(remote)
    hosts.write_text(f"{host}\n")
    os.environ["CIUIC_REMOTE_KEY_FILE"] = key
    os.environ["XDG_CACHE_HOME"] = f"{host}/cache"
    os.environ["XDG_STATE_HOME"] = f"{host}/state"
    return f"file://{remote}"


def lose_last(remote: str) -> None:
    """Remove the last host of a remote when its uploads have ended, which outlive its training."""
    host = Path(Path(f"{remote}.hosts").read_text().strip())
    for save_dir in (host / "state/ciuic/trainings").iterdir():
        until("the end of the uploads", partial(_is_done, str(save_dir)))
    shutil.rmtree(host)


def _is_done(save_dir: str) -> bool:
    """Return whether everything is uploaded, and nothing runs that would write to the directory."""
    place = state_dir(save_dir)
    with Repository.open(save_dir) as repository:
        records = [read_record(name, place) for name in os.listdir(place)] if place.is_dir() else []
        stored = [record is not None and record.stored >= repository.snapshots.names() for record in records]
    return bool(stored) and all(stored) and not _named_by_a_process(save_dir)


def _named_by_a_process(save_dir: str) -> bool:
    """Return whether a process has the directory in its command line.

    As every uploader does, also one that has no lock yet because another had it when this one was started.
    """
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if save_dir.encode() in (entry / "cmdline").read_bytes():
                return True
    return False


EXAMPLES = Path(__file__).parents[2] / "examples"


TWO_RANKS = """
import os, runpy, socket, sys
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
other = os.fork()
rank = str(int(not other))
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
found = runpy.run_path(SCRIPT, run_name="__main__")
if not other:
    os._exit(0)
_, status = os.waitpid(other, 0)
assert not status, status
model, FACTS = found["model"], found.get("FACTS")
"""


def on_two_ranks(script: Path, where: Path) -> Path:
    """Return a script that runs the given one twice at once, with the variables that torchrun sets."""
    made = where / f"{script.stem}_on_two_ranks.py"
    made.write_text(TWO_RANKS.replace("SCRIPT", repr(str(script))))
    return made


ELSEWHERE = """
import os, runpy, sys
from support.runs import take_over
_, host = sys.argv
sys.argv = [SCRIPT, take_over(host, REMOTE)]
found = runpy.run_path(SCRIPT, run_name="__main__")
model = found["model"]
"""


def remote_for(script: Path, where: Path) -> Path:
    """Return the directory of the remote for `with_url`."""
    return where / f"{script.stem}-remote"


def with_url(script: Path, where: Path) -> Path:
    """Return a script that runs the given one with a remote's URL for its directory; the argument is a host."""
    made = where / f"{script.stem}_elsewhere.py"
    remote = remote_for(script, where)
    remote.mkdir()
    made.write_text(ELSEWHERE.replace("SCRIPT", repr(str(script))).replace("REMOTE", repr(str(remote))))
    return made


def run(
    modules: str, *runs: str, where: Path, allowed_s: float = 280, python: WarmPython | None = None
) -> list[dict[str, Any]]:
    """Run scripts and return their results.

    ``python``: has imported the modules, or most of them; None: a new process imports them.
    ``runs``: ``parts@SCRIPT``, ``parts:7@SCRIPT`` …: a directory for snapshots below ``where``, and the step
    of the kill.
    """
    results = where / "results"
    results.unlink(missing_ok=True)
    if python is None:
        with WarmPython() as python:
            return run(modules, *runs, where=where, allowed_s=allowed_s, python=python)
    done = python.run(
        [
            Path(__file__).with_name("run_script.py"),
            modules,
            results,
            *(where / name for name in runs),
        ],
        cwd=where,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "PYTHONHASHSEED": "0",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "HF_HUB_OFFLINE": "1",
        },
        timeout=allowed_s,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in results.read_text().splitlines()]
    expected = [-signal.SIGKILL if ":" in name else 0 for name in runs]
    assert [one["status"] for one in found] == expected, done.stderr
    return found


def assert_goes_on(
    modules: str,
    scripts: dict[Path, tuple[int, ...]],
    where: Path,
    *,
    elsewhere: tuple[Path, int] | None = None,
    python: WarmPython | None = None,
) -> dict[Path, list[dict[str, Any]]]:
    """Assert that each script, killed in these steps, ends with the bits of an undisturbed run.

    The last run took fewer steps, and a further one has nothing left to do. Returns the results of its runs.
    All in one process, for the imports. ``elsewhere``: one of the scripts, killed in this step of one more run,
    whose host is lost; it goes on from a remote, on another host that has nothing but the URL and the key.
    """
    names = {
        script: [
            f"{script.stem}-{run}@{script}"
            for run in ("whole", *(f"parts:{step}" for step in kills), "parts", "parts")
        ]
        for script, kills in scripts.items()
    }
    runs = [name for of_one in names.values() for name in of_one]
    half = len(runs) // 2
    if elsewhere is not None:
        made = with_url(elsewhere[0], where)
        # Other runs go on while what these have saved is uploaded.
        runs = [f"lost:{elsewhere[1]}@{made}", *runs[:half], f"new@{made}", *runs[half:]]
    results = run(modules, *runs, where=where, python=python)
    if elsewhere is not None:
        _, *results = results
        last_elsewhere = results.pop(half)
    left = iter(results)
    found = {script: [next(left) for _ in of_one] for script, of_one in names.items()}
    for uninterrupted, *_, last, again in found.values():
        assert last["digest"] == uninterrupted["digest"]
        assert 0 < last["steps"] < uninterrupted["steps"], "it began anew"
        assert again["steps"] == 0
        assert again["digest"] == uninterrupted["digest"]
    if elsewhere is not None:
        lose_last(str(remote_for(elsewhere[0], where)))
        uninterrupted = found[elsewhere[0]][0]
        assert last_elsewhere["digest"] == uninterrupted["digest"]
        assert 0 < last_elsewhere["steps"] < uninterrupted["steps"], "it began anew"
    return found
