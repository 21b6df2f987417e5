"""Snapshots of a training as a table, and the choice of one by step, epoch or metric.

Imports the reading of snapshots and the rules, no writer and no framework.
"""
