"""URLs by which others than the services read and write objects by themselves, without the store's keys.

Clients upload data by them, and the ranks of a user's own code do all that they do with the store (`signed_store`).
"""

from __future__ import annotations

from datetime import timedelta
from urllib.parse import urlsplit

from minio import Minio

from shared.settings import StoreSettings
from shared.storage.minio_client import S3_ENDPOINT

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
