"""Runner of training scripts that are killed and run again, each forked after the imports.

For some frameworks the imports take longer than the training.

    python run_script.py 'MODULES' RESULTS SAVE_DIR[:KILLED_AT_STEP]@SCRIPT …

MODULES: imported before the first fork, separated by blanks. KILLED_AT_STEP: SIGKILL in the middle of this
step of the process, after all that was staged is stored, so that the next run's start does not depend on the
writer's speed. RESULTS gets one JSON line for each run: its exit status, and a digest of the weights of its
script's `model`, if it came to its end.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from typing import Any


def main(modules: str, results: str, *runs: str) -> None:
    for module in (*modules.split(), "ciuic.training.manager"):
        importlib.import_module(module)
    if "torch" in sys.modules:
        # Otherwise the first optimizer of every run imports it.
        importlib.import_module("torch._dynamo")
    # Keeps the imported objects out of every run's garbage collection.
    gc.freeze()
    for run in runs:
        run, _, script = run.partition("@")
        save_dir, _, step = run.partition(":")
        child = os.fork()
        if not child:
            _child(script, save_dir, int(step or 0), results)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) or os.WEXITSTATUS(status):
            _write(results, {"status": os.waitstatus_to_exitcode(status)})


def _child(script: str, save_dir: str, killed_at_step: int, results: str) -> None:
    status = 1
    try:
        sys.argv = [script, save_dir]
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        first_steps = _watch(killed_at_step)
        found = runpy.run_path(script, run_name="__main__")
        _write(
            results,
            {
                "status": 0,
                "digest": _digest(found["model"]),
                "steps": first_steps[0],
                "facts": found.get("FACTS"),
            },
        )
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _watch(killed_at_step: int) -> list[int]:
    """Count the optimizer's steps of this process, and kill it in the middle of one."""
    from ciuic.training.manager import SnapshotManager

    managers: list[SnapshotManager] = []
    make = SnapshotManager.__init__

    def made(self: SnapshotManager, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        managers.append(self)

    SnapshotManager.__init__ = made  # type: ignore[method-assign]
    steps = [0]

    def step(*_: object) -> None:
        steps[0] += 1
        if steps[0] == killed_at_step:
            for manager in managers:
                manager.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    if "keras" in sys.modules:
        callbacks = sys.modules["keras"].callbacks.CallbackList
        before = callbacks.on_train_batch_begin

        def on_train_batch_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            # The batch is read again, and not trained on.
            if self.callbacks[0].model.train_function.__name__ != "pass_by":
                step()
            return before(self, *args, **kwargs)

        callbacks.on_train_batch_begin = on_train_batch_begin
    elif "torch" in sys.modules:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(step)
    return steps


def _digest(model: Any) -> str:
    hasher = hashlib.sha256()
    if hasattr(model, "state_dict"):
        for value in model.state_dict().values():
            hasher.update(value.detach().cpu().contiguous().numpy().tobytes())
    else:
        for value in model.get_weights():
            hasher.update(value.tobytes())
    return hasher.hexdigest()


def _write(results: str, line: dict[str, Any]) -> None:
    with open(results, "a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
