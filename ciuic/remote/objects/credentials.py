"""Credentials, region and endpoint of an object store from the usual places: what obstore does not find by itself.

obstore reads the environment, web identity files and the metadata of instances and containers. This module
adds the shared files of AWS (``~/.aws``, with profiles and ``credential_process``), the environment, file and
instance metadata of Alibaba Cloud, and Azure's connection string. Nothing here is logged or shown; an error
names a file and a key, never a value. `Secret` hides its values from repr and tracebacks.

Every client of an S3-compatible store (obstore's and botocore's) is made from its `S3Place`, so that all of
them reach the same one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Final, NamedTuple, TypedDict

from ciuic.errors import NotPermitted, UsageError
from ciuic.remote.objects.urls import RemoteUrl, StoreSettings
from ciuic.system.child_process import program_environment

_MAX_FILE_BYTES = 1 << 20
_MAX_REPLY_BYTES = 1 << 16
_PROCESS_TIMEOUT_SECONDS = 30
# Keys of files, which may be replaced at any time. obstore asks a provider ten times a second while a key has less than
# five minutes left, botocore at each request within half a minute: what costs more than two stats is kept by `AwsProvider`.
_FILE_LIFETIME = timedelta(seconds=20)
# A program or service that says nothing of an end is asked again after this time.
_ANSWER_LIFETIME = timedelta(minutes=1)
# Keys that end are asked for again when a request may take longer than they have left.
_REFRESH_BEFORE = timedelta(minutes=5)
# A file that was changed within this time may be in the middle of it: it is read again, so often at most.
_SETTLED_SECONDS: Final = 0.5
_MAX_READS: Final = 16
_ALIBABA_METADATA = "http://100.100.100.200"
_METADATA_TIMEOUT_SECONDS = 3


class NoCredentials(NotPermitted):
    """Missing or unusable credentials for an object store; the message names the places that were looked at."""


class Credential(TypedDict):
    """Credential as obstore takes it from a provider."""

    access_key_id: str
    secret_access_key: str
    token: str | None
    expires_at: datetime | None


@dataclass(frozen=True)
class Secret:
    """Access key of an S3-compatible store; repr shows none of it."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    expires: datetime | None = None

    def as_credential(self, now: datetime) -> Credential:
        """Return the form that obstore takes, with the time at which it is to ask again."""
        until = now + _FILE_LIFETIME if self.expires is None else self._asked_again(now)
        return Credential(
            access_key_id=self.access_key_id,
            secret_access_key=self.secret_access_key,
            token=self.token,
            expires_at=max(until, now + timedelta(seconds=5)),
        )

    def _asked_again(self, now: datetime) -> datetime:
        """Return the time at which who gave the key is to be asked for the next one."""
        if self.expires is None:
            return now + _ANSWER_LIFETIME
        return self.expires - max(min(_REFRESH_BEFORE, (self.expires - now) / 2), timedelta(0))

    def kept_until(self, now: datetime) -> datetime:
        """Return the time until which a program that printed the key now is not run again."""
        return max(self._asked_again(now), now + timedelta(seconds=1))


class AwsProfile:
    """Profile of AWS's shared files: AWS_PROFILE or ``default``."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.name: Final = (
            environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
        )
        self.is_chosen: Final = self.name != "default"
        home = environment.get("HOME") or os.path.expanduser("~")
        self._credentials_file = environment.get("AWS_SHARED_CREDENTIALS_FILE") or f"{home}/.aws/credentials"
        self._config_file = environment.get("AWS_CONFIG_FILE") or f"{home}/.aws/config"

    def values(self) -> dict[str, str]:
        """Return the keys of the profile from both files, `credentials` first; empty if there is none."""
        in_credentials, in_config = self._sections()
        return {**in_config, **in_credentials}

    def _sections(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the keys of the profile in `credentials` and in `config`."""
        section = self.name if self.name == "default" else f"profile {self.name}"
        return _section(self._credentials_file, self.name), _section(self._config_file, section)

    def version(self) -> tuple[object, ...]:
        """Return what differs once either file was changed."""
        return tuple(map(_version_of, (self._credentials_file, self._config_file)))

    def secret(self) -> Secret | None:
        """Return the profile's access key, or None where it has none.

        Raises:
            NoCredentials: the profile is named but missing, or of a kind that only AWS's tools resolve.
        """
        in_credentials, in_config = self._sections()
        # Of one file: a token belongs to the key beside it.
        for own in (in_credentials, in_config):
            if own.get("aws_access_key_id") and own.get("aws_secret_access_key"):
                token = own.get("aws_session_token") or None
                return Secret(own["aws_access_key_id"], own["aws_secret_access_key"], token)
        values = {**in_config, **in_credentials}
        if command := values.get("credential_process"):
            return _ask_process(command, self.name)
        if not values and self.is_chosen:
            raise NoCredentials(
                f"no profile {self.name!r} in {self._credentials_file} or {self._config_file} (AWS_PROFILE)"
            )
        if {"role_arn", "sso_session", "sso_start_url", "source_profile"} & values.keys():
            raise NoCredentials(
                f"profile {self.name!r} assumes a role or signs in, which only the aws command does",
                hint="add to a profile: credential_process = aws configure export-credentials "
                f"--profile {self.name} --format process",
            )
        return None


class AwsProvider:
    """Credential provider of obstore over the shared files of AWS. May be used by several threads at once."""

    def __init__(self, profile: AwsProfile) -> None:
        self._profile = profile
        self._lock = threading.Lock()
        self._known: _KnownSecret | None = None

    def __call__(self) -> Credential:
        """Return the key as it is in the files now; a program is asked when it is time."""
        now = datetime.now(timezone.utc)
        # Before the files are read: a change meanwhile has them read again.
        version = self._profile.version()
        with self._lock:
            known = self._known
            if known is None or known.version != version or now >= known.until:
                secret = self._profile.secret()
                if secret is None:
                    raise NoCredentials(f"profile {self._profile.name!r} has no access key any more")
                known = self._known = _KnownSecret(secret, version, secret.kept_until(now))
        return known.secret.as_credential(now)


class _KnownSecret(NamedTuple):
    secret: Secret
    version: tuple[object, ...]
    until: datetime


def aws_provider(environment: Mapping[str, str] = os.environ) -> AwsProvider | None:
    """Return a provider where the shared files have a key and the environment has none; else None.

    The order is that of AWS's own tools: environment, web identity, shared files, container, instance.

    Raises:
        NoCredentials: as `AwsProfile.secret`.
    """
    if environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"):
        return None
    if environment.get("AWS_WEB_IDENTITY_TOKEN_FILE") or environment.get("AWS_SKIP_SIGNATURE"):
        return None
    profile = AwsProfile(environment)
    return AwsProvider(profile) if profile.secret() is not None else None


def aws_keys(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return obstore's configuration from the access key in the environment; empty where there is none.

    obstore reads the process's environment too, but not the one that a caller gives.
    """
    names = {
        "AWS_ACCESS_KEY_ID": "access_key_id",
        "AWS_SECRET_ACCESS_KEY": "secret_access_key",
        "AWS_SESSION_TOKEN": "session_token",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": "metadata_endpoint",
    }
    return {names[key]: environment[key] for key in names if environment.get(key)}


class AlibabaProvider:
    """Credential provider of obstore for OSS: environment, ``~/.ossutilconfig``, RAM role of the instance."""

    def __init__(
        self, environment: Mapping[str, str] = os.environ, metadata_url: str = _ALIBABA_METADATA
    ) -> None:
        self._environment = environment
        self._metadata_url = metadata_url

    def __call__(self) -> Credential:
        """Return the key.

        Raises:
            NoCredentials: none of the places has one.
        """
        now = datetime.now(timezone.utc)
        for key, secret, token in (
            ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET", "OSS_SESSION_TOKEN"),
            (
                "ALIBABA_CLOUD_ACCESS_KEY_ID",
                "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
                "ALIBABA_CLOUD_SECURITY_TOKEN",
            ),
        ):
            if self._environment.get(key) and self._environment.get(secret):
                found = Secret(
                    self._environment[key], self._environment[secret], self._environment.get(token) or None
                )
                return found.as_credential(now)
        found_in_file = self._from_file()
        return (found_in_file or self._from_instance()).as_credential(now)

    def _from_file(self) -> Secret | None:
        home = self._environment.get("HOME") or os.path.expanduser("~")
        path = self._environment.get("OSS_CONFIG_FILE") or f"{home}/.ossutilconfig"
        # Version 1 of ossutil writes [Credentials], version 2 [default] or [profile NAME].
        for section in ("Credentials", "default", "profile default"):
            values = _section(path, section)
            if "accesskeyid" in values and "accesskeysecret" in values:
                token = values.get("ststoken") or values.get("stsToken".lower()) or None
                return Secret(values["accesskeyid"], values["accesskeysecret"], token)
        return None

    def _from_instance(self) -> Secret:
        role = _fetch(self._metadata_url + "/latest/meta-data/ram/security-credentials/")
        if not role or "/" in role or len(role) > 128:
            raise NoCredentials(
                "no credentials for OSS: not in OSS_ACCESS_KEY_ID, ALIBABA_CLOUD_ACCESS_KEY_ID, ~/.ossutilconfig "
                "or a RAM role of this instance"
            )
        reply = _fetch(f"{self._metadata_url}/latest/meta-data/ram/security-credentials/{role.strip()}")
        return _secret_of_json(
            reply, "the instance's metadata", ("AccessKeyId", "AccessKeySecret", "SecurityToken")
        )


def azure_connection(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return obstore's configuration from AZURE_STORAGE_CONNECTION_STRING; empty where it is not set."""
    text = environment.get("AZURE_STORAGE_CONNECTION_STRING", "")
    fields = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    names = {
        "AccountName": "account_name",
        "AccountKey": "account_key",
        "SharedAccessSignature": "sas_key",
        "BlobEndpoint": "endpoint",
    }
    return {names[key]: value for key, value in fields.items() if key in names and value}


def _section(path: str, section: str) -> dict[str, str]:
    """Return a section of an INI file, keys in lower case; empty if file or section are not there."""
    try:
        text = _read_settled(path)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeError) as exc:
        # The text of a UnicodeError repeats bytes of the file.
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise NoCredentials(f"cannot read the credentials in {path}: {reason}") from None
    import configparser

    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        # The parser's message repeats the line, which may be a key.
        raise NoCredentials(f"cannot read the credentials in {path}: not sections of KEY = VALUE") from None
    return dict(parser[section]) if parser.has_section(section) else {}


def _version_of(path: str) -> tuple[int, ...]:
    """Return what differs once the file was replaced or written; empty if it cannot be looked at."""
    try:
        st = os.stat(path)
    except OSError:
        return ()
    return st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns


def _read_settled(path: str) -> str:
    """Return the content of a file, not that of one moment while it is written anew.

    A program that rewrites a file in place leaves it empty or cut short for a moment: a key with the token of another one.
    """
    for _ in range(_MAX_READS):
        with open(path, encoding="utf-8") as file:
            changed = os.fstat(file.fileno()).st_ctime
            text = file.read(_MAX_FILE_BYTES)
        # Of a clock that is ahead, such as a file server's, nothing is known: then the reads come to an end.
        if not -60 < time.time() - changed < _SETTLED_SECONDS:
            break
        time.sleep(_SETTLED_SECONDS / 4)
    return text


def _ask_process(command: str, profile: str) -> Secret:
    """Return the key that ``credential_process`` prints.

    References: "Sourcing credentials with an external process", AWS SDKs and Tools Reference Guide.
    """
    source = f"credential_process of profile {profile!r}"
    try:
        done = subprocess.run(
            shlex.split(command),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            cwd="/",
            # The program of the user's own configuration, which may ask for the profile and the region.
            env={
                **program_environment(),
                **{name: value for name, value in os.environ.items() if name.startswith("AWS_")},
            },
            timeout=_PROCESS_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as exc:
        # TimeoutExpired has the output, which is the key.
        raise NoCredentials(f"{source} failed: {type(exc).__name__}") from None
    if done.returncode:
        raise NoCredentials(f"{source} failed with exit code {done.returncode}")
    return _secret_of_json(done.stdout.decode(errors="replace"), source)


def _secret_of_json(
    text: str, source: str, names: tuple[str, str, str] = ("AccessKeyId", "SecretAccessKey", "SessionToken")
) -> Secret:
    try:
        reply = json.loads(text[:_MAX_REPLY_BYTES])
        key, secret, token = (reply.get(name) for name in names)
        until = reply.get("Expiration")
        expires = datetime.fromisoformat(until.replace("Z", "+00:00")) if until else None
        if expires is not None and expires.tzinfo is None:
            expires = expires.replace(tzinfo=timezone.utc)
    except (ValueError, AttributeError):
        raise NoCredentials(f"{source} did not answer with JSON of {', '.join(names)}") from None
    if not (isinstance(key, str) and isinstance(secret, str) and isinstance(token, str | None)):
        raise NoCredentials(f"{source} did not answer with {names[0]} and {names[1]}")
    return Secret(key, secret, token, expires)


def _fetch(url: str) -> str:
    """Return a small document of the instance's metadata service; empty where there is none."""
    # Slow to import, and used on instances of one cloud alone.
    import urllib.error
    import urllib.request

    # Metadata must not be asked of a proxy, which would see the key.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    base = url.split("/latest/")[0]
    try:
        asking = urllib.request.Request(
            f"{base}/latest/api/token",
            method="PUT",
            headers={"X-aliyun-ecs-metadata-token-ttl-seconds": "300"},
        )
        with opener.open(asking, timeout=_METADATA_TIMEOUT_SECONDS) as reply:
            token = reply.read(_MAX_REPLY_BYTES).decode("ascii", "replace")
        request = urllib.request.Request(url, headers={"X-aliyun-ecs-metadata-token": token})
        with opener.open(request, timeout=_METADATA_TIMEOUT_SECONDS) as reply:
            document: bytes = reply.read(_MAX_REPLY_BYTES)
    except (OSError, urllib.error.URLError, ValueError):
        return ""
    return document.decode("utf-8", "replace")


class S3Place(NamedTuple):
    """Place of an S3-compatible store."""

    region: str
    endpoint: str
    """URL of the server without the bucket; empty for that of AWS in the region."""
    virtual_hosted: bool
    """True if the bucket is part of the host name."""
    signs_payloads: bool
    """True if the store is to compare a SHA-256 of each body."""

    def with_bucket(self, bucket: str) -> str:
        """Return the endpoint with the bucket as the first part of its host name, as obstore expects it."""
        scheme, _, host = self.endpoint.partition("://")
        return self.endpoint if host.startswith(f"{bucket}.") else f"{scheme}://{bucket}.{host}"

    def without_bucket(self, bucket: str) -> str:
        """Return the endpoint without the bucket, as botocore expects it."""
        scheme, _, host = self.endpoint.partition("://")
        return f"{scheme}://{host.removeprefix(f'{bucket}.')}" if self.endpoint else ""


def s3_place(url: RemoteUrl, settings: StoreSettings, environment: Mapping[str, str]) -> S3Place:
    """Return where the bucket of an ``s3`` or ``oss`` URL is.

    Raises:
        UsageError: OSS without a region and an endpoint.
        NoCredentials: AWS's shared files cannot be read.
    """
    if url.scheme == "oss":
        region, endpoint = _oss_place(settings, environment)
        profile: dict[str, str] = {}
    else:
        profile = AwsProfile(environment).values()
        region = (
            settings.region
            or environment.get("AWS_REGION")
            or environment.get("AWS_DEFAULT_REGION")
            or profile.get("region")
            or "us-east-1"
        )
        endpoint = (
            settings.endpoint
            or environment.get("AWS_ENDPOINT_URL_S3")
            or environment.get("AWS_ENDPOINT_URL")
            # obstore's own name for it, which it would read without us.
            or environment.get("AWS_ENDPOINT")
            or profile.get("endpoint_url", "")
        )
    virtual = settings.virtual_hosted
    if virtual is None and url.scheme != "oss":
        virtual = _addressing(profile)
    if virtual is None:
        virtual = url.scheme == "oss" or not endpoint
    signs = settings.sign_payloads
    # Over TLS the SDKs of AWS do not hash bodies either.
    return S3Place(region, endpoint, virtual, endpoint.startswith("http://") if signs is None else signs)


def _addressing(profile: Mapping[str, str]) -> bool | None:
    """Return whether the profile has the bucket in the host name (``addressing_style`` below ``s3``); None where it does not say.

    References: "Settings for Amazon S3", AWS CLI User Guide.
    """
    # A setting with settings of its own, one a line.
    found = re.search(r"^\s*addressing_style\s*=\s*(virtual|path)\s*$", profile.get("s3", ""), re.MULTILINE)
    return None if found is None else found[1] == "virtual"


def _oss_place(settings: StoreSettings, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return region and S3-compatible endpoint of OSS."""
    region = (settings.region or environment.get("OSS_REGION", "")).removeprefix("oss-")
    endpoint = settings.endpoint or environment.get("OSS_ENDPOINT", "")
    if not region and not endpoint:
        raise UsageError("oss:// needs a region or an endpoint", hint='region = "cn-hangzhou"')
    if endpoint and "://" not in endpoint:
        endpoint = f"https://{endpoint}"
    # From within the region the name with -internal costs nothing; the operator writes it as the endpoint.
    return region or "us-east-1", endpoint or f"https://s3.oss-{region}.aliyuncs.com"
