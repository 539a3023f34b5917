"""Writes one imported split, and what is held out of it, side by side; statistics are taken meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from data_service.domain.layout import Routing
from data_service.domain.statistics import SplitStatistics
from data_service.ingest.threads import Behind
from shared.dataset_version import SplitWriter
from shared.dataset_version.manifest import DataFile
from shared.storage import ObjectStore


class SplitFiles:
    """`first_row_ids` has those of the routing's targets; `statistics` and `row_counts` are by target. The thread of
    `behind` writes the files."""

    def __init__(
        self,
        store: ObjectStore,
        folder: str,
        scratch: Path,
        schema: pa.Schema,
        routing: Routing,
        first_row_ids: Mapping[str, int],
        behind: Behind,
    ) -> None:
        self._behind = behind
        self._routing = routing
        self._first_row_ids = first_row_ids
        self._writers = {
            target: SplitWriter(store, folder, scratch, schema=schema, split=target, first_row_id=first_row_ids[target])
            for target in routing.targets
        }
        self.statistics = {target: SplitStatistics(schema) for target in routing.targets}
        self.row_counts = dict.fromkeys(routing.targets, 0)

    @property
    def rows_added(self) -> int:
        return sum(self.row_counts.values())

    def add(self, table: pa.Table) -> None:
        """The next rows of the imported split."""
        begin = self.rows_added
        for number, target in enumerate(self._routing.targets):
            rows = self._routed(table, begin, number)
            self._behind.do(self._writers[target].write, rows)
            self.statistics[target].update(rows, self._first_row_ids[target] + self.row_counts[target])
            self.row_counts[target] += rows.num_rows

    def close(self) -> list[DataFile]:
        """Writes and uploads what is pending. Returns the files."""
        return [file for writer in self._writers.values() for file in self._behind.result(writer.close)]

    def _routed(self, table: pa.Table, begin: int, target: int) -> pa.Table:
        """The rows of `table`, which starts at row `begin` of its split, that belong to the target of that number."""
        choice = self._routing.choice
        return table if choice is None else table.filter(pa.array(choice[begin : begin + table.num_rows] == target))
