"""A training state as files: structure, tensors, sparse arrays, layout, facts, and reading all of it back.

Nothing that is stored is executed. The package may import `util` and the repository.
"""
