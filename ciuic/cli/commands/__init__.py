"""Commands, one module for each; the module's name is the command's (`hold_release` has two).

Those about trainings have a room of their own. A command parses, asks and prints; the work is the library's.
The package may import `shared` and `doctor`.
"""
