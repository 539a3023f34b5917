"""The tutorials' shared storage, /mnt/cluster_storage, with some of MNIST's digits where they would download them."""

from __future__ import annotations

import fcntl
import gzip
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.support.idx import write_idx
from tests.support.needs import Missing

STORAGE = Path("/mnt/cluster_storage")
LOCK = Path("/tmp/millrace-cluster-storage.lock")
DIGITS = Path(__file__).parents[3] / "shared" / "data" / "mnist" / "MNIST" / "raw"
# Of an IDX file of bytes: of one dimension (labels), and of three.
HEADER_BYTES = {1: 8, 3: 16}
SIDE = 28


@contextmanager
def cluster_storage(rows: int) -> Iterator[Path]:
    """The first `rows` digits of either part, unpacked, so that torchvision finds that nothing is left to download.
    One test of the machine has it at a time."""
    if not DIGITS.is_dir():
        Missing(f"{DIGITS} is not there", "MILLRACE_REQUIRE_DATA").end_test()
    with LOCK.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            STORAGE.mkdir()
        except (PermissionError, FileExistsError) as error:
            Missing(f"{STORAGE} cannot be made ({error.strerror})", "MILLRACE_REQUIRE_CLUSTER_STORAGE").end_test()
        try:
            raw = STORAGE / "data" / "MNIST" / "raw"
            raw.mkdir(parents=True)
            for packed in DIGITS.glob("*.gz"):
                values = np.frombuffer(gzip.decompress(packed.read_bytes()), np.uint8)
                images = "images" in packed.name
                body = values[HEADER_BYTES[3 if images else 1] :]
                write_idx(raw / packed.stem, (body.reshape(-1, SIDE, SIDE) if images else body)[:rows])
            yield STORAGE
        finally:
            shutil.rmtree(STORAGE)
