"""Where an S3-compatible store is: region, endpoint and form of its addresses, from the URL, settings and environment.

Every client of such a store (obstore's and botocore's) is made from this, so that all of them reach the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ciuic.errors import UsageError
from ciuic.remote.objects.credentials import AwsProfile
from ciuic.remote.objects.urls import RemoteUrl, StoreSettings


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
    if virtual is None:
        virtual = url.scheme == "oss" or not endpoint
    signs = settings.sign_payloads
    # Over TLS the SDKs of AWS do not hash bodies either.
    return S3Place(region, endpoint, virtual, endpoint.startswith("http://") if signs is None else signs)


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
