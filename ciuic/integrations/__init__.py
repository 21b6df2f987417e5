"""`SnapshotManager` through the hooks of training frameworks, one module each (docs/integrations.md).

This package imports none of them: `ciuic.integrations.keras` imports Keras, and so on.
"""
