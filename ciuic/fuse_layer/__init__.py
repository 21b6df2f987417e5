"""The FUSE overlay of one protected root: a core that tracks changes and keeps sealed epochs readable, and its drivers.

`worker` is the process that serves a root, `standby` the process that forks workers and captures, `prefork`
both ends of its protocol. The package may import the library (`ciuic.system`, `ciuic.protocol`,
`ciuic.errors`), and nothing of the daemon or the command line.
"""
