"""Faults in the core, made by hand: what a tired engineer would get wrong, and what a user would lose by it.

`make torture ARGS=mutants` has the tests look for each (tests/torture/mutants.py). A module for each subject.
"""

from __future__ import annotations

import importlib
import pkgutil

from mutants.model import Mutant

MUTANTS: tuple[Mutant, ...] = tuple(
    mutant._replace(subject=module)
    for module in sorted(found.name for found in pkgutil.iter_modules(__path__))
    if module != "model"
    for mutant in importlib.import_module(f"mutants.{module}").MUTANTS
)
