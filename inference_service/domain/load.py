"""What a model has to do: how many rows wait or are at work, and how many it had to refuse."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """Over some seconds: the mean of the rows that waited or were at work, and those refused for want of capacity."""

    rows: float
    refused: int


class LoadMeter:
    """Exact means over the time between two readings, however short the peaks. Times are seconds on one clock."""

    def __init__(self, now_s: float) -> None:
        self._rows = self._refused = 0
        self._row_seconds = 0.0
        self._since_s = self._read_s = now_s

    def add(self, rows: int, now_s: float) -> None:
        """So many more; fewer, where it is negative."""
        self._row_seconds += self._rows * (now_s - self._since_s)
        self._since_s = now_s
        self._rows += rows

    def refuse(self, rows: int) -> None:
        self._refused += rows

    def read(self, now_s: float) -> Load:
        """Since the last reading; what is now, where no time has passed."""
        self.add(0, now_s)
        passed_s = now_s - self._read_s
        load = Load(self._row_seconds / passed_s if passed_s > 0 else float(self._rows), self._refused)
        self._row_seconds, self._refused, self._read_s = 0.0, 0, now_s
        return load
