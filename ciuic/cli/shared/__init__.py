"""What several commands use: options, output, progress, tables, the session with daemon or repository.

The package imports no command.
"""
