"""The control socket: resources, and what each answers.

The package may import every part of the daemon but its main program.
"""
