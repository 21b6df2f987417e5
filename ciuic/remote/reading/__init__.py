"""Reading of a remote: its snapshots as a repository, from the bucket and the key alone.

Guarantees: content that does not match its seal and its chunk id is never returned; memory is bounded whatever the bucket
holds; what is kept on this host is a cache, verified when it is used, and may be deleted at any time. The package may
import `access`, `remote_index`, `log_reader` and what lies below them; it writes nothing to the remote.
"""
