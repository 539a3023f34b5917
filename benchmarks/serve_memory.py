"""The memory of a process over time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Held:
    """The medians of the first and of the last quarter of a period, in MiB."""

    first_mib: float
    last_mib: float

    @property
    def ratio(self) -> float:
        return self.last_mib / self.first_mib


class ProcessMemory:
    """Samples the memory of a process; raises `FileNotFoundError` once it has ended."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._resident_mib: list[float] = []

    def sample(self) -> None:
        (line,) = (one for one in (self._folder / "status").read_text().splitlines() if one.startswith("VmRSS:"))
        self._resident_mib.append(int(line.split()[1]) / 1024)

    def open_files(self) -> int:
        """Return the number of open files, including sockets."""
        return len(list((self._folder / "fd").iterdir()))

    def held(self, warm_up_share: float, min_warm_up: float) -> Held:
        """Return the quarters without the first samples: a share of them, and at least `min_warm_up`."""
        return quarters(self._resident_mib, warm_up_share, min_warm_up)


def quarters(samples: Sequence[float], warm_up_share: float, min_warm_up: float) -> Held:
    """Return the quarters; raise `ValueError` if fewer than four samples are left."""
    counted = samples[round(max(len(samples) * warm_up_share, min_warm_up)) :]
    if len(counted) < 4:
        raise ValueError(f"{len(samples)} samples are too few; soak for longer")
    quarter = len(counted) // 4
    return Held(statistics.median(counted[:quarter]), statistics.median(counted[-quarter:]))
