"""Verdicts on checkpoints: GOOD, TORN or UNKNOWN, each with its reason.

`file_verdict` judges one file, `checkpoint_verdict` a directory with its index or marker, each through a source that reads ranges
(`snapshot_source`, `live_source`). Nothing is executed or unpickled, and everything that is read may be hostile: memory and reads are
bounded. The package may import the repository and `ciuic.system`.
"""
