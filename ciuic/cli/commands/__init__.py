"""Commands: a module for each, or for the few that a person looks for together (`app._MODULES` says where each is).

A command parses, asks and prints; the work is the library's. The package may import `shared`, `doctor_checks` and `probes`.
"""
