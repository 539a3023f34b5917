"""Records of the rows that the workers consumed.

Each rank keeps its records, a checkpoint gathers them, and its manifest names them.

A resumed run continues the chain of the checkpoint that it resumes from. So the record always describes the work that
is in the weights. Work of a lost attempt after its last checkpoint does not count.
"""

from __future__ import annotations

import io
import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shared.checkpoint import CheckpointEntry, CoveragePart, load_checkpoint
from shared.checkpoint.format import OTHER_FORMAT, sha256
from shared.errors import DataLoss
from shared.storage import ObjectMissing, ObjectStore
from train_service.domain.order import Ints

if TYPE_CHECKING:  # the service reads these records without torch
    from train_service.learning.ranks import Ranks

logger = logging.getLogger(__name__)

# Smaller neighbouring parts are merged up to this many rows.
PART_ROWS = 1 << 20

_RUNS = pa.run_end_encoded(pa.int32(), pa.int64())
# One run for each step of each rank. `skipped` is 1 for the rows of a step that the loss scaler skipped. A file without
# such rows has no such column, like all files of earlier releases.
SKIPPED = "skipped"
SCHEMA = pa.schema([("step", _RUNS), ("epoch", _RUNS), ("rank", _RUNS), ("row_id", pa.int64()), (SKIPPED, _RUNS)])


@dataclass(frozen=True)
class Taken:
    """One rank's records.

    `steps` has shape (n, 4): step, epoch, number of rows, and whether the step was skipped. `row_ids` are the rows of
    these steps, in order.
    """

    steps: Ints
    row_ids: Ints


def gather(ranks: Ranks, taken: Taken) -> pa.Table | None:
    """Return all ranks' records on rank 0.

    The table is of `SCHEMA`, in the order of steps. Other ranks get None. This is a collective: every rank must call it
    at the same point. It exchanges 8 bytes a row, and no rank waits for a store.
    """
    flat = np.concatenate([[len(taken.steps)], taken.steps.ravel(), taken.row_ids]).astype(np.int64)
    everyone = ranks.gather(flat)
    return None if everyone is None else _table(everyone)


def _table(everyone: Sequence[Ints]) -> pa.Table:
    runs: list[tuple[int, int, int, int, Ints]] = []
    for rank, flat in enumerate(everyone):
        count = int(flat[0])
        steps, row_ids = flat[1 : 1 + 4 * count].reshape(-1, 4), flat[1 + 4 * count :]
        ends = np.cumsum(steps[:, 2])
        for (step, epoch, rows, skipped), end in zip(steps.tolist(), ends.tolist(), strict=True):
            if rows:  # Arrow has no empty runs
                runs.append((step, rank, epoch, skipped, row_ids[end - rows : end]))
    runs.sort(key=lambda run: run[:2])
    ends = np.cumsum([len(rows) for *_, rows in runs]).astype(np.int32)

    def column(values: list[int]) -> pa.Array:
        return pa.RunEndEncodedArray.from_arrays(pa.array(ends), pa.array(values, pa.int64()), _RUNS)

    columns = [
        column([step for step, *_ in runs]),
        column([epoch for _, _, epoch, *_ in runs]),
        column([rank for _, rank, *_ in runs]),
        pa.array(np.concatenate([np.empty(0, np.int64), *(rows for *_, rows in runs)])),
        column([skipped for *_, skipped, _ in runs]),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


class CoverageChain:
    """The parts that a run's next checkpoint names. Rank 0 uses the chain, in one thread.

    A record of more than `PART_ROWS` rows becomes several parts, cut between steps. Neighbouring parts are merged like
    the digits of a binary counter: while the last part has more than half as many rows as the previous one, and both
    fit into `PART_ROWS`, they become one. So a manifest names at most (rows of the run) / 2^19 parts and some twenty
    small ones, however often checkpoints are taken, and each row is written again some thirty times at most. Merged
    parts stay until no checkpoint names them; see `orphans`.
    """

    def __init__(self, store: ObjectStore, job: str, parts: Sequence[CoveragePart] = ()) -> None:
        """Create the chain. `parts` are those of the checkpoint that the run resumes from."""
        self._store = store
        self._job = job
        self._small: dict[str, pa.Table] = {}
        self.parts = tuple(parts)

    def append(self, table: pa.Table) -> tuple[CoveragePart, ...]:
        """Write the record and return the new chain.

        The checkpoint must name this chain. If the store fails, its error is raised, and the call may be repeated with
        the same table. A table that the chain already ends with is not added twice.
        """
        if not table.num_rows:
            return self.parts
        first, end = _bounds(table)
        if self.parts and first < self.parts[-1].end_step:
            if end == self.parts[-1].end_step:
                return self.parts
            raise ValueError(f"steps {first} to {end} overlap the record, which ends at {self.parts[-1].end_step}")
        chain = list(self.parts)
        for piece in _pieces(table):
            self._add(chain, piece)
        self.parts = tuple(chain)
        named = {one.path for one in chain if one.row_count < PART_ROWS // 2}
        self._small = {path: kept for path, kept in self._small.items() if path in named}
        return self.parts

    def _add(self, chain: list[CoveragePart], table: pa.Table) -> None:
        """Write `table`, merged with the last parts. The merged part replaces those parts in `chain`."""
        first, end = _bounds(table)
        rows = table.num_rows
        while chain and chain[-1].row_count < 2 * rows and chain[-1].row_count + rows <= PART_ROWS:
            before = self._table_of(chain[-1])
            if before is None:
                break
            table, first = pa.concat_tables([before, table]).combine_chunks(), chain[-1].first_step
            rows = table.num_rows
            chain.pop()
        data = encode(table)
        part = CoveragePart(
            path=f"{self._job}/coverage/{uuid.uuid4().hex}.arrow",
            sha256=sha256(data),
            first_step=first,
            end_step=end,
            row_count=rows,
        )
        self._store.put(part.path, data)
        chain.append(part)
        self._small[part.path] = table

    def _table_of(self, part: CoveragePart) -> pa.Table | None:
        """Return the table of a part.

        The result is None for a damaged part, which then stays. A query for the coverage reports the damage.
        """
        held = self._small.get(part.path)
        if held is not None:
            return held
        try:
            return read_part(self._store, part)
        except DataLoss as error:
            logger.warning("the record of steps %d to %d: %s", part.first_step, part.end_step, error.message)
            return None


def _pieces(table: pa.Table) -> Iterator[pa.Table]:
    """Cut `table` between steps into pieces.

    A piece has at most `PART_ROWS` rows, unless a single step has more. A reader of a record holds one part in memory,
    so the record of an epoch without a checkpoint is not one part.
    """
    if table.num_rows <= PART_ROWS:
        yield table
        return
    columns = {name: _decoded_column(table, name) for name in table.column_names if name != "row_id"}
    row_ids = table.column("row_id").to_numpy()
    steps = columns["step"]
    ends = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))
    begin = 0
    while begin < len(steps):
        fitting = int(np.searchsorted(ends, begin + PART_ROWS, side="right")) - 1
        end = int(ends[max(fitting, int(np.searchsorted(ends, begin, side="right")))])
        piece = [
            pa.array(row_ids[begin:end])
            if name == "row_id"
            else pc.run_end_encode(pa.array(columns[name][begin:end]), run_end_type=pa.int32())
            for name in table.column_names
        ]
        yield pa.Table.from_arrays(piece, schema=table.schema)
        begin = end


def _decoded_column(table: pa.Table, name: str) -> Ints:
    return np.concatenate([_decoded(batch, name) for batch in table.to_batches()])


def encode(table: pa.Table) -> bytes:
    """Return `table`, of `SCHEMA`, as an Arrow file."""
    sink = io.BytesIO()
    if not _has_skipped(table):
        table = table.drop_columns(SKIPPED)
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return sink.getvalue()


def read_part(store: ObjectStore, part: CoveragePart) -> pa.Table:
    """Return a part as a table of `SCHEMA`. Raises `DataLoss` if the part is missing or does not match the manifest."""
    try:
        data = store.get(part.path)
    except ObjectMissing:
        raise DataLoss(f"{part.path} is missing", metadata={"file": part.path}) from None
    if sha256(data) != part.sha256:
        raise DataLoss(f"{part.path} does not have the digest that its manifest names", metadata={"file": part.path})
    table = pa.ipc.open_file(data).read_all()
    if SKIPPED in table.column_names:
        return table
    rows = pa.array([table.num_rows] if table.num_rows else [], pa.int32())
    nothing = pa.RunEndEncodedArray.from_arrays(rows, pa.array([0] * len(rows), pa.int64()), _RUNS)
    return table.append_column(SCHEMA.field(SKIPPED), nothing).combine_chunks()


def row_ids_of(table: pa.Table, epoch: int) -> Ints:
    """Return the rows of `epoch` in the weights. They are in the order of steps."""
    return _row_ids(table, epoch, 0)[0]


def skipped_of(table: pa.Table, epoch: int) -> tuple[Ints, set[int]]:
    """Return the skipped rows and steps of `epoch`. The loss scaler skipped these steps."""
    return _row_ids(table, epoch, 1) if _has_skipped(table) else (np.empty(0, np.int64), set())


def _has_skipped(table: pa.Table) -> bool:
    return any(max(chunk.values.to_pylist(), default=0) for chunk in table.column(SKIPPED).chunks)


def _row_ids(table: pa.Table, epoch: int, skipped: int) -> tuple[Ints, set[int]]:
    chosen, steps = [], set[int]()
    for batch in table.to_batches():
        mine = _decoded(batch, "epoch") == epoch
        mine &= _decoded(batch, SKIPPED) == skipped
        chosen.append(batch.column("row_id").to_numpy()[mine])
        if skipped:
            steps.update(np.unique(_decoded(batch, "step")[mine]).tolist())
    return np.concatenate([np.empty(0, np.int64), *chosen]), steps


def _decoded(batch: pa.RecordBatch, column: str) -> Ints:
    values: Ints = pc.run_end_decode(batch.column(column)).to_numpy(zero_copy_only=False)
    return values


def orphans(
    store: ObjectStore, job: str, checkpoints: Iterable[CheckpointEntry], chain: Sequence[CoveragePart] = ()
) -> list[str]:
    """Return the keys of the unnamed records of `job`.

    Neither `checkpoints` nor `chain` name them. A caller that deletes them must know every valid checkpoint and be the
    only writer of new ones. Its `chain` must be the present one, which includes the parts of a checkpoint that is being
    written.
    """
    named = {part.path for part in chain}
    for entry in checkpoints:
        try:
            content = load_checkpoint(store, entry.folder, entry.manifest_sha256).content
        except DataLoss as error:
            if error.specific_reason == OTHER_FORMAT:
                return []  # only the release that wrote it knows what it names
            continue  # it can serve neither a resumption nor a query for its coverage
        named.update(part.path for part in content.coverage)
    return sorted(info.key for info in store.list(f"{job}/coverage") if info.key not in named)


def delete_coverage(store: ObjectStore, job: str) -> None:
    """Delete all records of a deleted job."""
    store.delete_folder(f"{job}/coverage")


def _bounds(table: pa.Table) -> tuple[int, int]:
    """Return the steps [first, end) of a table."""
    steps = [values for chunk in table.column("step").chunks for values in (chunk.values.to_pylist())]
    return min(steps), max(steps) + 1
