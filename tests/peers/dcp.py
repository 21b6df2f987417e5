"""Run PyTorch's own tests of torch.distributed.checkpoint, with torch's file storage and with ours in its place.

    python tests/peers/dcp.py CHECKOUT/test/distributed/checkpoint/test_file_system_checkpoint_cpu.py …

The tests are those of a checkout of PyTorch that the operator has made; nothing of it is in this repository. Each
file runs twice, in processes of its own, under gloo on the CPU: tests that ask for several GPUs get as many
processes. For every test both outcomes are printed, and the exit status is 1 if one passes with torch's classes
and not with ours.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).parents[2]
_FILE_SECONDS: Final = 1800
# In every process of the tests, those that they spawn included: `site` imports it before anything else.
_SITE: Final = """
import importlib.abc, importlib.util, os, sys

def _on_cpu(module):
    module.skip_if_lt_x_gpu = lambda *_, **__: (lambda test: test)

def _ours(package):
    from ciuic.training.dcp import filesystem
    for name in ("FileSystemWriter", "FileSystemReader"):
        theirs, ours = getattr(package, name), getattr(filesystem, name)
        for module in [one for key, one in sys.modules.items() if key.startswith("torch.distributed.checkpoint")]:
            if vars(module).get(name) is theirs:
                setattr(module, name, ours)

class _After(importlib.abc.MetaPathFinder):
    todo = {"torch.testing._internal.common_distributed": _on_cpu}
    if os.environ.get("PEERS_OURS"):
        todo["torch.distributed.checkpoint"] = _ours

    def find_spec(self, name, path, target=None):
        then = self.todo.pop(name, None)
        if then is None:
            return None
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            then(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, _After())
"""


def outcomes(file: Path, *, ours: bool, site: Path, select: str) -> dict[str, str]:
    """Run one file and return the outcome of each test by name."""
    report = site / f"{file.stem}-{'ours' if ours else 'theirs'}.xml"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(site), str(CHECKOUT))),
        "PEERS_OURS": "1" * ours,
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
    ]
    command += [
        f"--junitxml={report}",
        "--rootdir",
        str(file.parent),
        str(file),
        *(("-k", select) if select else ()),
    ]
    log = report.with_suffix(".log")
    with open(log, "wb") as output:
        # The suite's own directory first: some of its tests import each other.
        subprocess.run(
            command,
            cwd=file.parent,
            env=environment,
            stdout=output,
            stderr=output,
            timeout=_FILE_SECONDS,
            check=False,
        )
    if not report.exists():
        return {"(the file)": "error"}
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"] = (
            kinds[0] if kinds else "passed"
        )
    return found


def main() -> int:
    """Compare the outcomes of all files that are named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-k", dest="select", default="", help="as of pytest")
    parser.add_argument("--keep", type=Path, help="directory in which the logs stay")
    chosen = parser.parse_args()
    worse = 0
    with tempfile.TemporaryDirectory() as temporary:
        site = chosen.keep or Path(temporary)
        site.mkdir(parents=True, exist_ok=True)
        (site / "sitecustomize.py").write_text(_SITE)
        for file in chosen.files:
            theirs, ours = (
                outcomes(file.resolve(), ours=which, site=site.resolve(), select=chosen.select)
                for which in (False, True)
            )
            print(
                f"{file.name}: torch {dict(Counter(theirs.values()))}, ciuic {dict(Counter(ours.values()))}"
            )
            for name, outcome in theirs.items():
                other = ours.get(name, "not run")
                if outcome != other:
                    worse += outcome == "passed"
                    print(f"  {name}: torch {outcome}, ciuic {other}")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
