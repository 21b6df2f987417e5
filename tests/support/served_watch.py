"""Watch socket in a thread of its own, as the daemon serves it, with trainers without incidents."""

from __future__ import annotations

import threading
from pathlib import Path

import trio

from ciuic.daemon.base.alerts import Alerts
from ciuic.daemon.base.events import EventBus
from ciuic.daemon.roots.permission import WatchPermission
from ciuic.daemon.trainers.emergency import Emergencies
from ciuic.daemon.trainers.registry import TrainerRegistry
from ciuic.daemon.trainers.watch_socket import WatchSocket


class ServedWatch:
    """Context manager of the socket. ``permission`` defaults to every user."""

    def __init__(self, directory: Path, permission: WatchPermission | None = None) -> None:
        self.path = directory / "watch.sock"
        self._directory = directory
        self._permission = permission or WatchPermission(everybody=True)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,))

    def __enter__(self) -> ServedWatch:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        trio.from_thread.run_sync(self._scope.cancel, trio_token=self._token)
        self._thread.join(60)

    def names(self) -> list[str]:
        """Return the names of watched trainers, from the event loop, which must be alive for it."""
        return [one.name for one in trio.from_thread.run_sync(self.trainers.statuses, trio_token=self._token)]

    def alerts(self) -> dict[str, str]:
        """Return active alerts: message by key."""
        return {
            alert.key: alert.message
            for alert in trio.from_thread.run_sync(self._alerts.standing, trio_token=self._token)
        }

    async def _main(self) -> None:
        events = EventBus(lambda: 0)
        self._alerts = Alerts(events, lambda: 0)

        async def take(request: object) -> object:
            await trio.sleep_forever()

        emergencies = Emergencies(
            take,  # type: ignore[arg-type]
            alerts=self._alerts,
            events=events,
            now_ns=lambda: 0,
            per_hour=lambda: 0,
            on_incident=lambda incident: None,
        )
        self.trainers = TrainerRegistry(
            alerts=self._alerts, emergencies=emergencies, now_ns=lambda: 0, on_change=lambda: None
        )
        watched = WatchSocket(self._directory, self.trainers, self._permission.__call__, alerts=self._alerts)
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            self.trainers.nursery = nursery
            nursery.start_soon(watched.serve)
            await watched.server.ready.wait()
            self._ready.set()
        self.trainers.close()
