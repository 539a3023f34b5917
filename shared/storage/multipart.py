"""What a killed writer leaves on S3: a large object goes there in parts, which stay until somebody aborts them."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.error import MinioException, S3Error

from shared.errors import Unavailable
from shared.settings import StoreSettings
from shared.storage.minio_client import minio_client

logger = logging.getLogger(__name__)

# Gone meanwhile: completed, or aborted by another.
GONE = "NoSuchUpload"


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
        raise Unavailable(
            "the object store does not answer; try again", reason="STORE_UNAVAILABLE", retry_after_s=1.0
        ) from error


def _abort(client: Minio, bucket: str, key: str, upload_id: str) -> None:
    try:
        client._abort_multipart_upload(bucket, key, upload_id)
    except S3Error as error:
        if error.code != GONE:
            logger.info("what a killed writer left of %s/%s stays: %s", bucket, key, error)
