"""Presigned URLs, with which other processes read and write objects without the store's keys.

Clients upload data with them. The ranks of a user's own code use them for all access to the store (`signed_store`).

Large objects are uploaded in parts. The holder of the store's keys begins and ends the upload, other processes send the
parts, and uploads that a killed writer has left are aborted.
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
    """Signs URLs without asking the server. Thread-safe.

    The URLs are valid for an hour. A PUT with such a URL writes or overwrites one object of any size, so the stored
    content must be compared with a digest.
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
            # Given explicitly; otherwise the client would ask the server for it.
            region=settings.s3_region,
            secure=endpoint.scheme == "https",
        )

    def get_url(self, key: str) -> str:
        """Return the URL of a GET. It also serves parts of the object, because a Range header is not signed."""
        return self._sign("GET", key)

    def put_url(self, key: str) -> str:
        """Return the URL of a PUT without headers of its own."""
        return self._sign("PUT", key)

    def part_url(self, key: str, upload_id: str, number: int) -> str:
        """Return the URL of a PUT of one part, counted from 1, of a multipart upload."""
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
    """Return a presigner; None if the store is not S3."""
    return Presigner(settings) if urlsplit(settings.url).scheme == "s3" else None


# --- Uploads in parts ---

logger = logging.getLogger(__name__)

# Some servers copy the parts together, and send nothing meanwhile.
COMPLETED_WITHIN = timedelta(seconds=300)
# The upload was completed, or aborted by another process.
GONE = "NoSuchUpload"


class MultipartUploads:
    """Begins and ends multipart uploads whose parts other processes send (`Presigner.part_url`).

    Thread-safe. All methods raise `Unavailable` if the store does not answer, and `ResourceExhausted` if it is full.
    """

    def __init__(self, store: ObjectStore) -> None:
        parts = urlsplit(store.settings.url)
        self._store = store
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        self._client = minio_client(store.settings)
        self._completing = minio_client(store.settings, COMPLETED_WITHIN)

    def begin(self, key: str) -> str:
        """Begin an upload and return its id."""
        with self._errors(key):
            headers = {"Content-Type": "application/octet-stream"}
            return self._client._create_multipart_upload(self._bucket, self._path(key), headers)  # type: ignore[arg-type]

    def complete(self, key: str, upload_id: str, etags: Sequence[str], size_bytes: int) -> None:
        """Make the object of the parts, in their order.

        The call may be repeated if its answer was lost.
        """
        parts = [Part(number, etag) for number, etag in enumerate(etags, 1)]
        with self._errors(key):
            try:
                self._completing._complete_multipart_upload(self._bucket, self._path(key), upload_id, parts)
            except S3Error as error:
                # If the whole object exists, an earlier call whose answer was lost has made it.
                if error.code != GONE or self._store.size(key) != size_bytes:
                    raise

    def abort(self, key: str, upload_id: str) -> None:
        """Free the storage of the parts. A missing upload is no error."""
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
    """Abort uploads below the folder `prefix` that began before `before`.

    A server that refuses is skipped, because it may clean up by itself. Raises `Unavailable` if no server answers.
    """
    parts = urlsplit(settings.url)
    folder = "/".join(filter(None, (parts.path.strip("/"), prefix.strip("/")))) + "/"
    client, marker, more = minio_client(settings), None, True
    try:
        while more:
            # The client has no public method for listing or aborting uploads.
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
