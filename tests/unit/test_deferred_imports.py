"""Tests of names that packages import when they are first used, and of old names."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize("package", ["ciuic.config", "ciuic.repository", "ciuic.restore"])
def test_every_name_that_a_package_offers_is_there(package: str) -> None:
    """Every name in `__all__` can be had, and no other name is invented."""
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("package", "old", "new"),
    [
        ("ciuic.restore", "Plan", "RestorePlan"),
        ("ciuic.restore", "Item", "RestoreItem"),
        ("ciuic.restore", "LeftOut", "OmittedSpecial"),
        ("ciuic.restore", "Progress", "RestoreProgress"),
        ("ciuic.restore", "Target", "RestoreTarget"),
        ("ciuic.config", "IoPriority", "IoPrioritySetting"),
        ("ciuic.retention", "Plan", "RetentionPlan"),
    ],
)
def test_an_old_name_works_and_warns_each_time(package: str, old: str, new: str) -> None:
    """An old name works for one version, so existing programs keep running, and warns each time."""
    module = importlib.import_module(package)
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match=new):
            assert getattr(module, old) is getattr(module, new)
