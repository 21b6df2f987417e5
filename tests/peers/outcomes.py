"""Run the tests of a checkout of another project twice, as they are and with our parts in place, and compare.

The checkout is the operator's; nothing of it is in this repository. Each run has a process of its own, which
replaces the parts before the tests import them, also in the processes that they start.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

CHECKOUT: Final = Path(__file__).parents[2]
VARIANT: Final = "PEERS_VARIANT"
"""Environment variable that tells a process of the tests which parts it gets; empty: those of the project itself."""
_TIMEOUT_SECONDS: Final = 3600
# `site` imports it before anything else, in every process of the tests, those that they start included.
_SITE: Final = """
import importlib.abc, importlib.util, os, sys, tempfile

VARIANT = os.environ["PEERS_VARIANT"]

class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, todo):
        self.todo = todo

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

def after_import(todo):
    sys.meta_path.insert(0, _AfterImport(todo))
"""


@dataclass(frozen=True)
class Suite:
    """Tests of a checkout and how to run them."""

    name: str
    """Name of the run in the report."""
    targets: Sequence[Path]
    """Files and directories, as arguments of pytest."""
    directory: Path
    """Root directory of pytest, in which the tests run and from which they import each other."""
    hooks: str
    """Python source that calls `after_import` with a function for each module that it changes; it reads `VARIANT`."""
    options: Sequence[str] = ()
    """Further options of pytest."""

    def run(self, variant: str, logs: Path) -> dict[str, str]:
        """Run the tests and return the outcome of each by name.

        Args:
            variant: Parts that the tests get; empty for those of the project itself.
            logs: Directory for the report and the output.
        """
        label = variant.replace(",", "-") or "theirs"
        report = logs / f"{self.name}-{label}.xml"
        scratch = logs / "tmp"
        scratch.mkdir(exist_ok=True)
        (logs / "sitecustomize.py").write_text(_SITE + self.hooks)
        # The suite's own directory as well: some of the tests import each other.
        paths = (logs, CHECKOUT, self.directory, *filter(None, [os.environ.get("PYTHONPATH")]))
        environment = {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "TMPDIR": str(scratch),
            VARIANT: variant,
        }
        command = [sys.executable, "-m", "pytest", "-q"]
        # The plugin of kmock, which is among our tools, does not load alone.
        command += ["-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:kmock"]
        command += ["-c", os.devnull, "--rootdir", str(self.directory), f"--junitxml={report}"]
        with open(report.with_suffix(".log"), "wb") as output:
            subprocess.run(
                [*command, *self.options, *map(str, self.targets)],
                cwd=self.directory,
                env=os.environ | environment,
                stdout=output,
                stderr=output,
                timeout=_TIMEOUT_SECONDS,
                check=False,
            )
        return _outcomes(report)

    def compare(self, variants: Sequence[str], logs: Path) -> int:
        """Run the tests as they are and with each variant, print what differs, and return how many became worse."""
        theirs = self.run("", logs)
        print(f"{self.name}: theirs {dict(Counter(theirs.values()))}", flush=True)
        worse = 0
        for variant in variants:
            ours = self.run(variant, logs)
            print(f"{self.name}: {variant} {dict(Counter(ours.values()))}", flush=True)
            worse += _print_differences(theirs, ours)
        return worse


def _outcomes(report: Path) -> dict[str, str]:
    if not report.exists():
        return {"(all)": "error"}
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        found[name] = kinds[0] if kinds else "passed"
    return found


def _print_differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> int:
    worse = 0
    for name, outcome in theirs.items():
        other = ours.get(name, "not run")
        if outcome != other:
            worse += outcome == "passed"
            print(f"  {name}: theirs {outcome}, ciuic {other}")
    return worse


class Command(NamedTuple):
    """Command line of a program that compares."""

    tests: list[Path]
    options: list[str]
    """Options for pytest."""
    logs: Path
    """Directory for the logs, which exists."""


@contextmanager
def command_line(description: str | None) -> Iterator[Command]:
    """Yield the command line; logs without a name of their own are removed at the end."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="+", type=Path)
    parser.add_argument("-k", dest="select", default="", help="as of pytest")
    parser.add_argument("--keep", type=Path, help="directory in which the logs stay")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        logs = (chosen.keep or Path(temporary)).resolve()
        logs.mkdir(parents=True, exist_ok=True)
        options = ["-k", chosen.select] if chosen.select else []
        yield Command([one.resolve() for one in chosen.tests], options, logs)


def compare_files(
    description: str | None, hooks: str, prepare: Callable[[Path, Path], Path] = lambda file, logs: file
) -> int:
    """Compare the outcomes of each file on the command line; return the exit status.

    Args:
        description: Text of ``--help``.
        hooks: As of `Suite`.
        prepare: Returns the file that runs in place of one, given that one and the directory for logs.
    """
    with command_line(description) as command:
        worse = [
            Suite(file.stem, (file,), file.parent, hooks, options=command.options).compare(
                ["ciuic"], command.logs
            )
            for file in (prepare(one, command.logs) for one in command.tests)
        ]
    return int(any(worse))
