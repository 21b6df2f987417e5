"""Sandbox of ciuic's processes: drops privileges, capabilities and system calls (seccomp) that a process does not need.

The profiles list the system calls of each kind of process. The package may import `ciuic.system`.
"""
