"""Taking in a bundle of code as it is streamed: into a spool file, then checked and stored."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from shared.code_bundle import SHA256, BundleRecord, CodeBundles
from shared.code_packing import MAX_BUNDLE_BYTES
from shared.errors import ResourceExhausted, invalid_field
from train_service.jobs.program_check import refuse_own_code

MAX_CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Header:
    """What the first message says of all chunks together."""

    sha256: str
    size_bytes: int


class BundleIntake:
    """`require_own_code` raises where callers' code is not to run: then none is taken in."""

    def __init__(self, bundles: CodeBundles, require_own_code: Callable[[], None] = refuse_own_code) -> None:
        self.bundles = bundles
        self._require_own_code = require_own_code

    async def receive(self, parts: AsyncIterator[Header | bytes]) -> BundleRecord:
        """The stored bundle. Holds one chunk in memory at a time. Raises what `CreateCodeBundle` says; whatever it
        raises, and where the caller goes away, no bundle is made and the spool file goes."""
        self._require_own_code()
        header = await anext(parts, None)
        if not isinstance(header, Header):
            raise invalid_field("header", None, "send it first, then the chunks")
        _check(header)
        # A folder, so that the store can upload the file by its path.
        with tempfile.TemporaryDirectory(prefix="millrace-bundle-") as folder:
            spooled = Path(folder, "bundle.tar")
            await _spool(header, parts, spooled)
            return await asyncio.to_thread(self.bundles.create, spooled, header.sha256)


async def _spool(header: Header, parts: AsyncIterator[Header | bytes], spooled: Path) -> None:
    received = 0
    with spooled.open("wb") as file:
        async for part in parts:
            if isinstance(part, Header):
                raise invalid_field("header", part.sha256, "send it once, before the chunks")
            received += len(part)
            if len(part) > MAX_CHUNK_BYTES:
                raise invalid_field("chunk", f"{len(part)} bytes", f"send at most {MAX_CHUNK_BYTES} bytes in a message")
            if received > header.size_bytes:
                break
            await asyncio.to_thread(file.write, part)
    if received != header.size_bytes:
        more = "more" if received > header.size_bytes else f"only {received}"
        raise invalid_field("header.size_bytes", header.size_bytes, f"{more} bytes came; send as many as it says")


def _check(header: Header) -> None:
    if not SHA256.fullmatch(header.sha256):
        raise invalid_field("header.sha256", header.sha256, "use 64 digits of lower-case hex")
    if header.size_bytes < 1:
        raise invalid_field("header.size_bytes", header.size_bytes, "use 1 or more")
    if header.size_bytes > MAX_BUNDLE_BYTES:
        raise ResourceExhausted(
            f"header.size_bytes: a bundle has at most {MAX_BUNDLE_BYTES:,} bytes, not {header.size_bytes:,}; data "
            "belongs in a dataset version, or is named in .millraceignore",
            reason="BUNDLE_TOO_LARGE",
            metadata={"max_size_bytes": str(MAX_BUNDLE_BYTES)},
        )
