"""Access to a remote: make one, open it with a secret, and manage its key slots.

Guarantees: a remote is made only in a store that proved create-only; its opener has authenticated its
remote.json where it is sealed. The room may import objects, sealing and format.
"""
