"""Run transformers' own tests of saving and resuming, with the Trainer's files and with `SnapshotCallback`.

    python tests/peers/transformers.py CHECKOUT/tests/trainer/test_trainer.py … -k "resume or checkpoint or save or best"

The tests are those of a checkout of transformers that the operator has made, of a version near the installed one;
they also need parameterized. They run twice on the CPU: as they are, and with the callback in every Trainer, which
saves when the Trainer saves, and resumes from the snapshot of the step whose checkpoint the test names. Where there
is none, because the test has written the checkpoint in another way, the Trainer resumes from the files. Differences
are printed, and the exit status is 1 if a test passes without ours and not with it.
"""

from __future__ import annotations

import sys
from typing import Final

from outcomes import compare_files

# One repository for each directory of a Trainer: a test resumes with a second Trainer what the first has saved there,
# as a program would in its next run. Its manager is closed before, as the end of a run does.
_HOOKS: Final = """

def _ours(module):
    theirs, managers, repositories = module.Trainer.train, [], {}

    def snapshot_of(callback, trainer, checkpoint):
        named = module.get_last_checkpoint(trainer.args.output_dir) if checkpoint is True else checkpoint
        framework, step = callback.manager.framework, str(named).rpartition("-")[2]
        # Newest first: a resumed run saves the steps again.
        saved = [one.id for one in callback.manager.list_snapshots() if str(one.facts.step) == step]
        if not saved:
            return checkpoint
        newest = framework.load_state
        framework.load_state = lambda find: newest(lambda: callback.manager.load_snapshot(saved[0]))
        try:
            return callback.resume(trainer)
        finally:
            framework.load_state = newest

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        from ciuic.integrations.transformers import SnapshotCallback
        while managers:
            managers.pop().close()
        where = repositories.setdefault(self.args.output_dir, os.path.join(tempfile.mkdtemp(), "snapshots"))
        callback = SnapshotCallback(where)
        managers.append(callback.manager)
        self.add_callback(callback)
        try:
            if resume_from_checkpoint:
                resume_from_checkpoint = snapshot_of(callback, self, resume_from_checkpoint)
            return theirs(self, resume_from_checkpoint, *args, **kwargs)
        finally:
            self.remove_callback(callback)

    module.Trainer.train = train

if VARIANT:
    after_import({"transformers.trainer": _ours})
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"
"""


if __name__ == "__main__":
    sys.exit(compare_files(__doc__, _HOOKS))
