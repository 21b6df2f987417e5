"""Fixtures of the smoke tests: each capability once through the real program, as a newcomer's `make test` runs them."""

from support.live import live as live
from support.live import protected as protected
from support.live import root as root
from support.site import site as site
