"""Trainings that are killed at random instants and started anew, and the comparison with an undisturbed run.

A case is a module of ``cases`` with ``train(run: ResumedRun)``. ``trial`` starts it in forked processes and kills
them, ``child`` is what runs in these processes, and ``judge`` compares states and reported values.
"""
