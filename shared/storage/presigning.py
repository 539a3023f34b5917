"""URLs by which clients put objects into the store by themselves."""

from __future__ import annotations

from datetime import timedelta
from urllib.parse import urlsplit

from minio import Minio

from shared.settings import StoreSettings

VALID_FOR = timedelta(hours=1)


class Presigner:
    """Signs without asking the server. The URLs name the endpoint as clients see it, for it is part of what is signed.

    One PUT with such a URL writes, or writes over, the one object, of whatever size; so what was put must be held
    against a digest.
    """

    def __init__(self, settings: StoreSettings) -> None:
        parts = urlsplit(settings.url)
        endpoint = urlsplit(settings.public_s3_endpoint or settings.s3_endpoint or "https://s3.amazonaws.com")
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

    def put_url(self, key: str) -> str:
        """The URL of a PUT with no header of its own, good for an hour."""
        path = f"{self._prefix}/{key}" if self._prefix else key
        return self._client.presigned_put_object(self._bucket, path, expires=VALID_FOR)


def presigner(settings: StoreSettings) -> Presigner | None:
    """None where the store is not S3."""
    return Presigner(settings) if urlsplit(settings.url).scheme == "s3" else None
