"""The data service: uploads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from google.protobuf import empty_pb2

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import resources_pb2
from millrace_client.data_calls import DataCalls

if TYPE_CHECKING:
    from millrace_client.byte_sources import Source
    from millrace_client.uploads import OnProgress


class UploadCalls(DataCalls):
    def upload(
        self, dataset: str, source: Source, *, upload_id: str = "", on_progress: OnProgress | None = None
    ) -> resources_pb2.Upload:
        """Sends a file or bytes into a new upload of `datasets/{d}`: see `millrace_client.uploads.upload`."""
        from millrace_client.uploads import upload

        return upload(self._caller, self._stub, dataset, source, upload_id=upload_id, on_progress=on_progress)

    def upload_presigned(
        self,
        dataset: str,
        path: str | os.PathLike[str],
        *,
        upload_id: str = "",
        part_size_bytes: int = 0,
        on_progress: OnProgress | None = None,
    ) -> resources_pb2.Upload:
        """Sends a file past the service, straight to S3: see `millrace_client.presigned_upload.upload_presigned`."""
        from millrace_client.presigned_upload import upload_presigned

        return upload_presigned(
            self._caller,
            self._stub,
            dataset,
            path,
            upload_id=upload_id,
            part_size_bytes=part_size_bytes,
            on_progress=on_progress,
        )

    def resume_upload(
        self, name: str, source: Source, *, on_progress: OnProgress | None = None
    ) -> resources_pb2.Upload:
        """Goes on with an upload that broke off: see `millrace_client.uploads.resume_upload`."""
        from millrace_client.uploads import resume_upload

        return resume_upload(self._caller, self._stub, name, source, on_progress=on_progress)

    def get_upload(self, name: str) -> resources_pb2.Upload:
        return self._caller.unary(self._stub.GetUpload, pb.GetUploadRequest(name=name), resources_pb2.Upload)

    def abort_upload(self, name: str) -> None:
        """Takes an upload away, with its bytes. Raises `FailedPrecondition` while an import reads it."""
        self._caller.unary(self._stub.AbortUpload, pb.AbortUploadRequest(name=name), empty_pb2.Empty)
