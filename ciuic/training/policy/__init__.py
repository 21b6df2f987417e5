"""Rules of when to save and what to keep: pure functions of steps, times and metrics.

The package may import `util`, `state`, `format` and `ranks`.
"""
