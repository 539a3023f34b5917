"""The client of the `minio` package, for what the store's own client cannot ask an S3 server for."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from minio import Minio

    from shared.settings import StoreSettings

S3_ENDPOINT = "https://s3.amazonaws.com"

CONNECT_TIMEOUT = timedelta(seconds=5)
# A server that accepts and then says nothing for so long is given up.
SILENCE_TIMEOUT = timedelta(seconds=10)


def minio_client(settings: StoreSettings, silence: timedelta = SILENCE_TIMEOUT) -> Minio:
    """`silence` is how long a server may say nothing."""
    # Here alone: they take a sixth of a second, and workers, which start often, need none.
    import urllib3
    from minio import Minio

    endpoint = urlsplit(settings.s3_endpoint or S3_ENDPOINT)
    return Minio(
        endpoint=endpoint.netloc,
        access_key=settings.s3_access_key,
        secret_key=settings.s3_secret_key,
        region=settings.s3_region,
        secure=endpoint.scheme == "https",
        http_client=urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT.total_seconds(), read=silence.total_seconds()),
            retries=urllib3.Retry(total=2, backoff_factor=0.2),
        ),
    )
