"""Bundles of code for tests: from the texts of their files to packed bytes and stored bundles."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from shared.code_bundle_registry import BundleRecord, CodeBundles
from shared.code_packing import pack
from shared.storage import ObjectStore

LOOP = "def loop(config):\n    pass\n"


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Return the folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def packed_bytes(files: Mapping[str, str]) -> bytes:
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryFile() as file:
        pack(write_files(Path(made), files), file)
        file.seek(0)
        return file.read()


def store_bundle(store: ObjectStore, files: Mapping[str, str]) -> BundleRecord:
    with tempfile.TemporaryDirectory() as made:
        folder, spooled = Path(made, "code"), Path(made, "bundle.tar")
        with spooled.open("wb") as file:
            facts = pack(write_files(folder, files), file)
        return CodeBundles(store).create(spooled, facts.sha256)
