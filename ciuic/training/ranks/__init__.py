"""Communication between the ranks of one training: process groups, messages, and each rank's own state.

The package may import `state`, `format` and `util`.
"""
