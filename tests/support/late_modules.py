"""Modules that are imported when a test first uses them.

Every worker of a run collects every file: a framework that a file imports would cost each worker seconds.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class LateModule:
    """Module that is imported when the first of its attributes is asked for or set."""

    def __init__(self, name: str, *, lacking: str = "") -> None:
        """Name the module; the test that uses it is skipped with ``lacking`` where it is not installed."""
        vars(self).update(_late_name=name, _late_lacking=lacking)

    def _late_module(self) -> Any:
        if self._late_lacking:
            return pytest.importorskip(self._late_name, reason=self._late_lacking)
        return importlib.import_module(self._late_name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # pytest looks for such names in whatever a file has.
            raise AttributeError(name)
        return getattr(self._late_module(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._late_module(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._late_module(), name)


def skipped_without(*packages: str) -> pytest.MarkDecorator:
    """Return the mark of tests whose own processes import these packages."""
    lacking = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"not installed: {', '.join(lacking)}")


torch: Any = LateModule("torch", lacking="no CPU build of PyTorch is offered here")


@pytest.fixture(scope="session")
def torch_distributed() -> None:
    """Skip what needs the ranks of PyTorch where its build has none."""
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
