"""Versions that have their files in pages, although they are small."""

from __future__ import annotations

import pytest

from shared.dataset_version import pages
from shared.dataset_version import parquet as writing

FILE_BYTES = 40_000


def make_versions_paged(
    monkeypatch: pytest.MonkeyPatch, *, page_files: int = 2, children: int = 2, file_bytes: int = FILE_BYTES
) -> None:
    """Versions that are committed from now on have small files, and pages of two files, and two pages of a page."""
    monkeypatch.setattr(pages, "MAX_INLINE_FILES", 0)
    monkeypatch.setattr(pages, "MAX_PAGE_FILES", page_files)
    monkeypatch.setattr(pages, "MAX_CHILDREN", children)
    monkeypatch.setattr(writing, "MAX_FILE_BYTES", file_bytes)
