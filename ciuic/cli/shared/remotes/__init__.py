"""Remotes as the commands use them: opened for reading, chosen by options, waited for.

Nothing here is imported before a command needs a remote.
"""
