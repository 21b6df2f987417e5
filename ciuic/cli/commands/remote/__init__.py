"""The group ``ciuic remote``: one module for each of its commands, and ``group`` that lists them.

``targets`` finds the remote that an operator means, and its keys; ``adoption`` has this host use a remote. The package
may import `ciuic.cli.shared` and, when a command runs, the library.
"""
