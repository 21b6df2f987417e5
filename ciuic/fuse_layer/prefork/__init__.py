"""Processes that have imported everything already, and fork a worker or a capture in milliseconds.

Both ends of their protocol are here: the client for the daemon, the forker that systemd starts, and the
keeper that holds sessions without systemd. The package may import `journal` and `system`.
"""
