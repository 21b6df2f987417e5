"""Messages between ciuic's processes: control documents, HTTP over Unix sockets, worker frames, heartbeats and pairs.

Clients and the types of messages are here; servers are in the daemon and in the overlay worker. The package may import
`ciuic.system` and the layers below it.
"""
