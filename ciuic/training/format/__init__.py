"""A training state as files: structure, tensors, layout, facts, and reading all of it back.

Nothing that is stored is executed.
"""
