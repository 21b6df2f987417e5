"""Run Lightning's own tests of checkpoints, with its file storage and with `SnapshotCheckpointIO` in its place.

    python tests/peers/lightning.py CHECKOUT/tests/tests_pytorch/checkpointing …

The tests are those of a checkout of Lightning that the operator has made, of a version near the installed one; they
also need jsonargparse, cloudpickle, psutil and tensorboard. They run three times: as they are, with
`materialize="all"`, and with the default, which leaves files in place that name a snapshot. Differences are printed,
and the exit status is 1 if a test passes without the plugin and not with it. Tests that count the calls of
`torch.save`, or open a file that is no checkpoint of torch by the option's definition, do so.
"""

from __future__ import annotations

import sys
from typing import Final

from outcomes import Suite, command_line

# Lightning makes a TorchCheckpointIO for each strategy that was given no plugin. The managers of one test are closed when
# the next one begins: each has a process.
_HOOKS: Final = """

def _ours(module):
    plugins, of_test = [], [None]
    def snapshot_io():
        from ciuic.integrations.lightning import SnapshotCheckpointIO
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        while test != of_test[0] and plugins:
            plugins.pop().manager.close()
        of_test[0] = test
        plugins.append(SnapshotCheckpointIO(os.path.join(tempfile.mkdtemp(), "snapshots"), materialize=VARIANT))
        return plugins[-1]
    module.TorchCheckpointIO = snapshot_io

if VARIANT:
    after_import({"lightning.pytorch.strategies.strategy": _ours})
# TensorBoard uses TensorFlow where it is installed, which knows no memory://.
sys.modules["tensorboard.compat.notf"] = type(sys)("notf")
# h5py sets it when it is imported, and a test fails that finds a new variable.
os.environ.setdefault("HDF5_PLUGIN_PATH", "")
"""
_VARIANTS: Final = ("all", "best,last")


def main() -> int:
    """Compare the outcomes of the files and directories that are named on the command line."""
    with command_line(__doc__) as command:
        root = next(one for one in command.tests[0].parents if one.name == "tests")
        # Checkpoints of old versions have to be downloaded.
        options = ["--ignore-glob=*/test_legacy_checkpoints.py", *command.options]
        suite = Suite("lightning", command.tests, root, _HOOKS, options=options)
        return int(suite.compare(_VARIANTS, command.logs) > 0)


if __name__ == "__main__":
    sys.exit(main())
