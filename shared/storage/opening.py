"""Opens a store from its settings. Only this module knows the backends.

A store that does not honour put-if-absent would silently lose updates, so the start-up probe refuses it. The client of
the package `minio` sends requests that the store's own client cannot send to an S3 server.
"""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from obstore.store import LocalStore, S3Store
from pyarrow import fs

from shared.errors import Unavailable
from shared.settings import StoreSettings
from shared.storage.object_store import ObjectExists, ObjectStore

if TYPE_CHECKING:
    from minio import Minio
    from obstore.store import BackoffConfig


# --- Opening ---

# Short enough that an RPC can still answer UNAVAILABLE before its deadline.
RETRY_FOR = timedelta(seconds=10)
BACKOFF: BackoffConfig = {
    "init_backoff": timedelta(milliseconds=100),
    "max_backoff": timedelta(seconds=1),
    "base": 2,
}
# The limit of one request with all its bytes. Large objects are written in parts, and read without this limit.
REQUEST_TIMEOUT = timedelta(seconds=30)
# The library has no way to say "no limit".
UNLIMITED = timedelta(days=365)
# The limit of one part of a large object, or of a PUT above 1 MiB. While it is sent the server is silent, and the
# library cannot tell that bytes are going out.
WRITE_TIMEOUT = timedelta(seconds=120)


def open_store(settings: StoreSettings) -> ObjectStore:
    """Open the store. A missing local directory is created; a bucket must exist (`ensure_bucket`)."""
    parts = urlsplit(settings.url)
    return _open_local(Path(parts.path), settings) if parts.scheme == "file" else _open_s3(settings)


def ensure_bucket(settings: StoreSettings) -> None:
    """Create the bucket of an `s3://` store if it is missing. Does nothing for `file://`.

    Raises `StoreRefused` if the server refuses, `Unavailable` if it does not answer.
    """
    parts = urlsplit(settings.url)
    if parts.scheme != "s3":
        return
    # Imported here only: they take a sixth of a second, and workers, which start often, create no buckets.
    import urllib3
    from minio.error import MinioException, S3Error

    client = minio_client(settings)
    endpoint = urlsplit(settings.s3_endpoint or S3_ENDPOINT)
    try:
        if not client.bucket_exists(parts.netloc):
            client.make_bucket(parts.netloc)
    except S3Error as error:
        if error.code != "BucketAlreadyOwnedByYou":  # another service was faster
            raise StoreRefused(f"{settings.url} on {endpoint.netloc}: {error.code}: {error.message}") from None
    except (MinioException, ValueError) as error:  # minio raises it for an invalid bucket name
        raise StoreRefused(f"{settings.url} on {endpoint.netloc}: {error}") from None
    except urllib3.exceptions.HTTPError as error:
        raise Unavailable(
            f"no S3 server answers at {endpoint.netloc}", reason="STORE_UNAVAILABLE", retry_after_s=1.0
        ) from error


def _open_local(root: Path, settings: StoreSettings) -> ObjectStore:
    root.mkdir(parents=True, exist_ok=True)
    return ObjectStore(LocalStore(root), fs.SubTreeFileSystem(str(root), fs.LocalFileSystem()), settings)


def _open_s3(settings: StoreSettings) -> ObjectStore:
    parts = urlsplit(settings.url)
    prefix = parts.path.strip("/")
    endpoint = urlsplit(settings.s3_endpoint)

    def backend(timeout: timedelta, silence: timedelta) -> S3Store:
        return S3Store(
            parts.netloc,
            prefix=prefix or None,
            endpoint=settings.s3_endpoint or None,
            access_key_id=settings.s3_access_key,
            secret_access_key=settings.s3_secret_key,
            region=settings.s3_region,
            virtual_hosted_style_request=False,
            client_options={
                "allow_http": endpoint.scheme == "http",
                "connect_timeout": CONNECT_TIMEOUT,
                "read_timeout": silence,
                "timeout": timeout,
            },
            # As many retries as the time allows, because a restarting server is unavailable for some seconds.
            retry_config={"max_retries": 30, "retry_timeout": RETRY_FOR, "backoff": BACKOFF},
        )

    filesystem = fs.S3FileSystem(
        access_key=settings.s3_access_key,
        secret_key=settings.s3_secret_key,
        region=settings.s3_region,
        endpoint_override=endpoint.netloc or None,
        scheme=endpoint.scheme or "https",
        connect_timeout=5,
        request_timeout=30,
        # Arrow's default of three is too few: among the requests of one file, some are refused three times and would
        # succeed at the fifth try.
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=6),
    )
    root = f"{parts.netloc}/{prefix}" if prefix else parts.netloc
    tree = fs.SubTreeFileSystem(root, filesystem)
    return ObjectStore(
        backend(REQUEST_TIMEOUT, SILENCE_TIMEOUT),
        tree,
        settings,
        reading=backend(UNLIMITED, SILENCE_TIMEOUT),
        writing=backend(WRITE_TIMEOUT, WRITE_TIMEOUT),
    )


# --- Client of minio ---

S3_ENDPOINT = "https://s3.amazonaws.com"

CONNECT_TIMEOUT = timedelta(seconds=5)
# A server that accepts and then sends nothing for this time is given up.
SILENCE_TIMEOUT = timedelta(seconds=10)


def minio_client(settings: StoreSettings, silence: timedelta = SILENCE_TIMEOUT) -> Minio:
    """Make a client. `silence` is how long a server may send nothing."""
    # Imported here only: they take a sixth of a second, and workers, which start often, need none.
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


# --- Start-up probe ---

ROUNDS = 3
WRITERS = 8


class StoreRefused(RuntimeError):
    """The store cannot be used. The text says why."""


def probe(store: ObjectStore) -> None:
    """Test put-if-absent with racing writers.

    Raises `StoreRefused` unless each time exactly one writer wins and its value is read back, and for a missing bucket
    or refused credentials; `Unavailable` if nothing answers, and `ResourceExhausted` if the store is full.
    """
    try:
        _race(store)
    except Unavailable as error:
        if error.specific_reason == "STORE_REFUSED":
            raise StoreRefused(f"{store.settings.url}: {error.message}") from error
        raise


def _race(store: ObjectStore) -> None:
    folder = f"probe/{uuid.uuid4().hex}"
    with ThreadPoolExecutor(WRITERS) as pool:
        for round_number in range(ROUNDS):
            key = f"{folder}/{round_number}"
            try:
                values = [f"{writer}".encode() for writer in range(WRITERS)]
                won = list(pool.map(lambda value, key=key: _try(store, key, value), values))
                winners = [value for value, one in zip(values, won, strict=True) if one]
                # No winner: the winner's answer was lost, so its retry met its own write.
                if len(winners) > 1 or store.get(key) not in (winners or values):
                    raise StoreRefused(
                        f"{store.settings.url} does not honour put-if-absent (If-None-Match: *): of {WRITERS} "
                        f"concurrent creates {len(winners)} succeeded; "
                        "use a store with conditional writes, such as MinIO or S3"
                    )
            finally:
                store.delete(key)


def _try(store: ObjectStore, key: str, value: bytes) -> bool:
    try:
        store.put_if_absent(key, value)
    except ObjectExists:
        return False
    return True
