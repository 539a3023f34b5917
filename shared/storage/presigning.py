"""URLs by which others than the services read and write objects by themselves, without the store's keys.

Clients upload data by them, and the ranks of a user's own code do all that they do with the store (`signed_store`).

Large objects are uploaded in parts: begun and ended with the store's keys while others send the parts, and aborted
where a killed writer has left them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.datatypes import Part
from minio.error import MinioException, S3Error

from shared.settings import StoreSettings
from shared.storage.object_store import (
    ObjectStore,
    is_full_sign,
    refused_by_store,
    store_is_full,
    unresponsive_store,
    upload_is_gone,
)
from shared.storage.opening import S3_ENDPOINT, minio_client

# --- Signed URLs ---

VALID_FOR = timedelta(hours=1)


class Presigner:
    """Signs without asking the server; thread-safe. The URLs are good for an hour.

    One PUT with such a URL writes, or writes over, the one object, of whatever size; so what was put must be held
    against a digest.
    """

    def __init__(self, settings: StoreSettings, *, for_clients: bool = True) -> None:
        """The URLs name the endpoint, which is part of what is signed: as clients outside of the stack see it or, not
        `for_clients`, as the services and Ray's nodes do."""
        parts = urlsplit(settings.url)
        public = settings.public_s3_endpoint if for_clients else ""
        endpoint = urlsplit(public or settings.s3_endpoint or S3_ENDPOINT)
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/")
        self._client = Minio(
            endpoint=endpoint.netloc,
            access_key=settings.s3_access_key,
            secret_key=settings.s3_secret_key,
            # Given, or the client would ask the server for it.
            region=settings.s3_region,
            secure=endpoint.scheme == "https",
        )

    def get_url(self, key: str) -> str:
        """The URL of a GET, also of a part of the object: a Range header is not part of what is signed."""
        return self._sign("GET", key)

    def put_url(self, key: str) -> str:
        """The URL of a PUT with no header of its own."""
        return self._sign("PUT", key)

    def part_url(self, key: str, upload_id: str, number: int) -> str:
        """The URL of a PUT of one part, counted from 1, of an upload in parts that was begun."""
        return self._sign("PUT", key, {"partNumber": str(number), "uploadId": upload_id})

    def _sign(self, method: str, key: str, parameters: dict[str, str] | None = None) -> str:
        path = f"{self._prefix}/{key}" if self._prefix else key
        return self._client.get_presigned_url(
            method,
            self._bucket,
            path,
            expires=VALID_FOR,
            extra_query_params=dict(parameters or {}),
        )


def presigner(settings: StoreSettings) -> Presigner | None:
    """None where the store is not S3."""
    return Presigner(settings) if urlsplit(settings.url).scheme == "s3" else None


# --- Uploads in parts ---

logger = logging.getLogger(__name__)

# Some servers copy the parts together, and say nothing meanwhile.
COMPLETED_WITHIN = timedelta(seconds=300)
# Gone meanwhile: completed, or aborted by another.
GONE = "NoSuchUpload"


class MultipartUploads:
    """Begins and ends uploads whose parts others send by signed addresses (`Presigner.part_url`). Thread-safe.

    All methods raise `Unavailable` where the store does not answer, and `ResourceExhausted` where it is full."""

    def __init__(self, store: ObjectStore) -> None:
        parts = urlsplit(store.settings.url)
        self._store = store
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        self._client = minio_client(store.settings)
        self._completing = minio_client(store.settings, COMPLETED_WITHIN)

    def begin(self, key: str) -> str:
        """The id of a new upload."""
        with self._errors(key):
            headers = {"Content-Type": "application/octet-stream"}
            return self._client._create_multipart_upload(self._bucket, self._path(key), headers)  # type: ignore[arg-type]

    def complete(self, key: str, upload_id: str, etags: Sequence[str], size_bytes: int) -> None:
        """Makes the object of the parts, in their order. May be called again where its answer was lost."""
        parts = [Part(number, etag) for number, etag in enumerate(etags, 1)]
        with self._errors(key):
            try:
                self._completing._complete_multipart_upload(self._bucket, self._path(key), upload_id, parts)
            except S3Error as error:
                # Where it is there as a whole, it was made so by the call whose answer was lost.
                if error.code != GONE or self._store.size(key) != size_bytes:
                    raise

    def abort(self, key: str, upload_id: str) -> None:
        """Frees what the parts take; it is no error if there is no such upload."""
        with self._errors(key):
            _abort(self._client, self._bucket, self._path(key), upload_id)

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except S3Error as error:
            if error.code == GONE:
                raise upload_is_gone(key) from None
            if is_full_sign(f"<Code>{error.code}"):
                raise store_is_full(key) from error
            if error.code in ("InternalError", "SlowDown", "ServiceUnavailable"):
                raise unresponsive_store(key) from error
            raise refused_by_store(f"{error.code} for {key}: {error.message}") from error
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise unresponsive_store(key) from error


def abort_uploads(settings: StoreSettings, prefix: str, before: float) -> None:
    """Aborts what was begun below the folder `prefix` before `before`.

    A server that refuses is left alone: it may be set up to do it by itself. Raises `Unavailable` where none answers.
    """
    parts = urlsplit(settings.url)
    folder = "/".join(filter(None, (parts.path.strip("/"), prefix.strip("/")))) + "/"
    client, marker, more = minio_client(settings), None, True
    try:
        while more:
            # The client has no public method for either.
            page = client._list_multipart_uploads(parts.netloc, prefix=folder, key_marker=marker)
            for upload in page.uploads:
                begun = upload.initiated_time
                if begun and upload.upload_id and begun.timestamp() < before and upload.object_name.startswith(folder):
                    _abort(client, parts.netloc, upload.object_name, upload.upload_id)
            marker, more = page.next_key_marker, page.is_truncated and bool(page.next_key_marker)
    except MinioException as error:
        logger.info("what killed writers left below %s/%s stays: %s", parts.netloc, folder, error)
    except urllib3.exceptions.HTTPError as error:
        raise unresponsive_store(prefix) from error


def _abort(client: Minio, bucket: str, key: str, upload_id: str) -> None:
    try:
        client._abort_multipart_upload(bucket, key, upload_id)
    except S3Error as error:
        if error.code != GONE:
            logger.info("what a killed writer left of %s/%s stays: %s", bucket, key, error)
