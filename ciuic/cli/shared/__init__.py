"""Code that several commands share: options, output, progress, tables, the session with daemon or repository.

The package imports no command.
"""
