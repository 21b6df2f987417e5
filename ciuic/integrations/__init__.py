"""`SnapshotManager` by the hooks of training frameworks, one module each (docs/integrations.md).

Nothing is imported here: `ciuic.integrations.keras` imports Keras, and so on.
"""
