"""Read ``[remote]`` or ``[[remote]]`` of a TOML document into remotes of the configuration.

Guarantees: each key and each missing or contradictory one is an error with its line; the rest of the document
is read nevertheless. A remote with an error is left out.

The retention of a remote is at least the local one: a rule of ``[remote.keep]`` that is not set has the larger
of its default and the value in ``[retention]``, so that a remote forgets a snapshot before the host does only
if the operator says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from ciuic.config.keys import DEFAULT_REMOTE_NAME, REMOTE_KEYS, TIER_KEYS
from ciuic.config.model import Origin, RemoteConfig, RemotePrice, RemoteSchedule, TierRule
from ciuic.config.toml_source import TomlPath, line_of
from ciuic.retention import RetentionPolicy

TABLE = "remote"
TIER = "tier"
_SECTIONS = tuple(dict.fromkeys(name.partition(".")[0] for name in REMOTE_KEYS if "." in name))
_SHOWN = [f"{TABLE}.{name}" for name in REMOTE_KEYS]
# Default of each rule of [remote.keep], as the keys have them.
_LEAST = RetentionPolicy(
    keep_within_seconds=REMOTE_KEYS["keep.keep_within"].parse(REMOTE_KEYS["keep.keep_within"].default),
    keep_last=int(REMOTE_KEYS["keep.keep_last"].default),
    keep_emergency=int(REMOTE_KEYS["keep.keep_emergency"].default),
    keep_safety_seconds=REMOTE_KEYS["keep.keep_safety"].parse(REMOTE_KEYS["keep.keep_safety"].default),
)
_COUNTS = (
    "keep_last",
    "keep_hourly",
    "keep_daily",
    "keep_weekly",
    "keep_monthly",
    "keep_yearly",
    "keep_emergency",
)


class Complaints(Protocol):
    """Receiver of the errors of a file (`ciuic.config.draft.Draft`)."""

    def complain(self, message: str, line: int, hint: str = "") -> None:
        """Record an error at a line."""

    def unknown(self, name: str, known: Iterable[str], line: int, *, shown: str = "") -> None:
        """Record an unknown key, with the one of ``known`` that was probably meant."""

    def at(self, line: int) -> Origin:
        """Return the origin of what stands at a line."""


class ReadRemote(NamedTuple):
    """The valid values of one remote, by their names in ``REMOTE_KEYS``."""

    values: dict[str, Any]
    origins: dict[str, Origin]
    origin: Origin
    tiers: tuple[TierRule, ...] = ()

    def config(self, local: RetentionPolicy) -> RemoteConfig:
        """Return the remote, beside a local retention of ``local``."""
        get = self.values.get
        return RemoteConfig(
            name=get("name", DEFAULT_REMOTE_NAME),
            url=self.values["url"],
            endpoint=get("endpoint"),
            region=get("region"),
            bandwidth_bytes=get("bandwidth"),
            max_lag_seconds=get("max_lag"),
            encryption=get("encryption", True),
            key_file=get("key_file"),
            key_command=get("key_command", ()),
            storage_class=get("storage_class"),
            keep=self._keep(local),
            schedule=RemoteSchedule(get("schedule.interval", 0), get("schedule.window")),
            price=RemotePrice(get("price.put_per_1000"), get("price.get_per_1000"), get("price.gb_month")),
            tiers=self.tiers,
            origin=self.origin,
            origins=self.origins,
        )

    def _keep(self, local: RetentionPolicy) -> RetentionPolicy:
        get = self.values.get
        return RetentionPolicy(
            keep_within_seconds=get(
                "keep.keep_within", max(local.keep_within_seconds, _LEAST.keep_within_seconds)
            ),
            keep_safety_seconds=get(
                "keep.keep_safety", max(local.keep_safety_seconds, _LEAST.keep_safety_seconds)
            ),
            keep_tags=get("keep.keep_tags", local.keep_tags),
            **{
                name: get(f"keep.{name}", max(getattr(local, name), getattr(_LEAST, name)))
                for name in _COUNTS
            },
        )


def read_remotes(value: object, lines: Mapping[TomlPath, int], complaints: Complaints) -> list[ReadRemote]:
    """Return the remotes of a document without an error; each error goes to ``complaints``."""
    if isinstance(value, dict):
        tables: list[tuple[dict[str, object], TomlPath]] = [(value, (TABLE,))]
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        tables = [(table, (TABLE, index)) for index, table in enumerate(value)]
    else:
        complaints.complain(
            f"{TABLE} is a table: write [{TABLE}], or [[{TABLE}]] for each of several",
            line_of(lines, (TABLE,)),
        )
        return []
    found: list[ReadRemote] = []
    for table, path in tables:
        line = line_of(lines, path)
        read, is_valid = _read_one(
            {name: item for name, item in table.items() if name != TIER}, path, lines, complaints
        )
        if TIER in table:
            rules, are_valid = _read_tiers(table[TIER], (*path, TIER), lines, complaints)
            read, is_valid = read._replace(tiers=rules), is_valid and are_valid
        flaws = list(_flaws(table, read.values, [*found], alone=len(tables) == 1))
        for flaw, key in flaws:
            complaints.complain(flaw, read.origins[key].line if key in read.origins else line)
        if is_valid and not flaws:
            found.append(read)
    return found


def _read_one(
    table: dict[str, object], path: TomlPath, lines: Mapping[TomlPath, int], complaints: Complaints
) -> tuple[ReadRemote, bool]:
    """Return the valid values of a table, and whether it had no others."""
    read = ReadRemote({}, {}, complaints.at(line_of(lines, path)))
    is_valid = True
    for parts, raw in _flattened(table):
        name, line = ".".join(parts), line_of(lines, (*path, *parts))
        # A key in quotes may have a dot of its own, which makes it none of a table.
        if name not in REMOTE_KEYS or len(parts) != len(name.split(".")):
            is_valid = False
            if name in _SECTIONS:
                complaints.complain(f"{TABLE}.{name} is a table: write [{TABLE}.{name}]", line)
            else:
                complaints.unknown(f"{TABLE}.{name}", _SHOWN, line)
            continue
        try:
            read.values[name] = REMOTE_KEYS[name].parse(raw)
            read.origins[name] = complaints.at(line)
        except ValueError as error:
            is_valid = False
            complaints.complain(f"{TABLE}.{name}: {error}", line)
    return read, is_valid


def _read_tiers(
    value: object, path: TomlPath, lines: Mapping[TomlPath, int], complaints: Complaints
) -> tuple[tuple[TierRule, ...], bool]:
    """Return the valid rules of ``[[remote.tier]]``, and whether there were no others."""
    where = f"{TABLE}.{TIER}"
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        complaints.complain(f"{where} is a list of tables: write [[{where}]] for each", line_of(lines, path))
        return (), False
    rules: list[TierRule] = []
    for index, table in enumerate(value):
        line = line_of(lines, (*path, index))
        values: dict[str, Any] = {}
        sound = True
        for name, raw in table.items():
            at = line_of(lines, (*path, index, name))
            if name not in TIER_KEYS:
                complaints.unknown(f"{where}.{name}", [f"{where}.{known}" for known in TIER_KEYS], at)
                sound = False
                continue
            try:
                values[name] = TIER_KEYS[name].parse(raw)
            except ValueError as error:
                complaints.complain(f"{where}.{name}: {error}", at)
                sound = False
        missing = [name for name in ("after", "storage_class") if name not in table]
        for name in missing:
            complaints.complain(f"a [[{where}]] without {name}", line)
        if sound and not missing:
            rules.append(
                TierRule(
                    after_seconds=values["after"],
                    storage_class=values["storage_class"] or "",
                    kind=values.get("kind", "all"),
                    keep_newest=values.get("keep_newest", 1),
                )
            )
    return tuple(rules), len(rules) == len(value)


def _flattened(table: dict[str, object]) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield each key, behind the name of the table in it that has the key, and its value."""
    for name, value in table.items():
        if name in _SECTIONS and isinstance(value, dict):
            for inner, item in value.items():
                yield (name, inner), item
        else:
            yield (name,), value


def _flaws(
    table: dict[str, object], values: dict[str, Any], before: list[ReadRemote], *, alone: bool
) -> Iterator[tuple[str, str]]:
    """Yield what is missing in a table or contradicts another key, and the key that it is about."""
    if "url" not in table:
        yield f"a [{TABLE}] without a url", ""
    if "name" not in table and not alone:
        yield f"a [[{TABLE}]] without a name: of several, each needs one", ""
    if any(read.values.get("name") == values["name"] for read in before if "name" in values):
        yield f"a second [[{TABLE}]] with the name {values['name']}", "name"
    # Two uploaders of one repository to one place would do everything twice.
    if any(read.values["url"] == values["url"] for read in before if "url" in values):
        yield f"a second [[{TABLE}]] with the url {values['url']}", "url"
    if values.get("key_file") and values.get("key_command"):
        yield f"{TABLE}.key_file and {TABLE}.key_command must not be set together", "key_command"
    for key in ("key_file", "key_command"):
        if values.get("encryption") is False and values.get(key):
            yield f"{TABLE}.{key} has no use without encryption", key
    scheme = values.get("url", "").partition(":")[0]
    for key in ("endpoint", "region", "storage_class"):
        if scheme == "file" and values.get(key):
            yield f"{TABLE}.{key} has no use for a directory ({values['url']})", key
    if scheme in ("file", "gs", "oss") and table.get(TIER):
        yield (
            f"{TABLE}.{TIER} has no use for {scheme}://, whose storage classes are not changed from here",
            "url",
        )
    if scheme == "oss" and not values.get("endpoint") and not values.get("region"):
        yield f'{TABLE}.region must be set for oss://, such as "cn-hangzhou", or {TABLE}.endpoint', "url"
