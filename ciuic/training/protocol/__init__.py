"""Messages between a trainer and its writer process, and notices of cloud providers.

The package may import `policy`, and what is below it.
"""
