"""A child that ends: its first start with the first of the statuses ENDING, and so on; after those it stays.

It notes each start in the folder STARTS, under its first argument. Only a frontend of the number that ENDS does so,
where that is given.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    number = sys.argv[1]
    starts = Path(os.environ["STARTS"])
    count = len(list(starts.glob(f"{number}-*")))
    (starts / f"{number}-{count}").write_text(str(os.getpid()))
    statuses = os.environ["ENDING"].split(",")
    if number == os.environ.get("ENDS", number) and count < len(statuses):
        sys.exit(int(statuses[count]))
    while os.read(0, 1):
        pass
