"""State of one mount: nodes with their paths, open files and what they may hold, rules of opens; with tracking and without.

The package may import `journal`, `tracking` and the layers below them.
"""
