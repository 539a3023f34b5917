"""A child that notes each byte that it is sent in the folder NUDGED, and ends with its parent."""

from __future__ import annotations

import os
from pathlib import Path

if __name__ == "__main__":
    folder = Path(os.environ["NUDGED"])
    (folder / "started").touch()
    count = 0
    while os.read(0, 1):
        count += 1
        (folder / f"nudge-{count}").touch()
