"""Sockets for unprivileged callers, served by processes without privileges.

The package may import `base`.
"""
