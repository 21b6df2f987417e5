"""The checks of `ciuic doctor`.

The package may import `shared`.
"""
