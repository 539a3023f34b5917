"""The rows of a part with the model's predictions: within one of Ray's workers, or within the process in a test."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_service.domain.bad_rows import excerpt
from data_service.domain.transform_spec import CheckpointRef, Workers
from data_service.transforms.checking import CHAIN, Array, PredictionColumns, Preparation
from data_service.transforms.plan import PartitionRange
from data_service.transforms.work import LeftOut, SplitRows, TransformedRows, VersionRows, ended_in_time
from shared.checkpoint import load_checkpoint
from shared.checkpoint.missing_values import BadRow
from shared.code_bundle_registry import load_code
from shared.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from shared.storage import open_store
from shared.transforms import Batch, RowError, batch_of

if TYPE_CHECKING:
    from shared.models.loaded import LoadedModel


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedRows:
    """Rows with the model's input: `prepared` float32 (B, *shape)."""

    rows: SplitRows
    prepared: Array
    left_out: Sequence[LeftOut] = ()


@dataclass(frozen=True)
class Preparer:
    """Prepares the model's input.

    With `quarantines`, rows without a valid input are left out; otherwise the first one is an `InvalidArgument` that
    names it. As a `RowMaker` it makes no column, so it can count the valid rows.
    """

    source: VersionRows
    preparation: Preparation
    kept: Sequence[str]
    quarantines: bool
    schema: pa.Schema = pa.schema([])  # noqa: RUF009 (it is immutable)

    def rows(self, part: PartitionRange) -> Iterator[TransformedRows]:
        for one in self.prepared(part):
            yield TransformedRows(part.split, pa.table({}), one.rows.row_ids, one.left_out)

    def prepared(self, part: PartitionRange) -> Iterator[PreparedRows]:
        columns = [*self.kept, *(name for name in self.preparation.reads if name not in self.kept)]
        for rows in self.source.divided(part, columns):
            try:
                made = [few.apply_to_rows(self._prepare) for few in rows.few_pixels(self.preparation.images)]
            except InvalidArgument:
                if not self.quarantines:
                    raise
                yield self._one_by_one(rows)
            else:
                yield self._without_bad_rows(rows, made)

    def _prepare(self, batch: Batch) -> tuple[Array, dict[int, BadRow]]:
        """Returns the model's input, and the rows with a NaN or an infinity in it.

        Serving refuses such rows, too. Unless bad rows are left out, the first of them raises a `RowError`.
        """
        preparation = self.preparation
        steps, nans = preparation.steps, preparation.nans
        read = nans.nulls_for_nans({name: batch[name] for name in preparation.reads})
        with ended_in_time(steps.steps):
            made: Array = steps(read)[preparation.input_column]
        if not preparation.is_complete:
            return made, {}
        bad = nans.bad_rows(made, preparation.reads, lambda: {name: read[name] for name in preparation.floats})
        if bad and not self.quarantines:
            raise RowError(CHAIN, min(bad), _problem_text(bad[min(bad)]))
        return made, bad

    def _without_bad_rows(self, rows: SplitRows, made: Sequence[tuple[Array, dict[int, BadRow]]]) -> PreparedRows:
        """Removes the bad rows.

        `made` has the results of `_prepare` for consecutive pieces of the rows.
        """
        prepared = made[0][0] if len(made) == 1 else np.concatenate([one for one, _ in made])
        begins = np.cumsum([0, *(len(one) for one, _ in made)]).tolist()
        bad = {begin + row: one for begin, (_, found) in zip(begins, made, strict=False) for row, one in found.items()}
        if not bad:
            return PreparedRows(rows, prepared)
        good = np.ones(len(rows.row_ids), np.bool_)
        good[list(bad)] = False
        left_out = [
            LeftOut(
                int(rows.row_ids[row]), f"{CHAIN}: {_problem_text(one)}", excerpt(rows.table.select(self.kept), row)
            )
            for row, one in sorted(bad.items())
        ]
        return PreparedRows(where(rows, good), prepared[good], left_out)

    def _one_by_one(self, rows: SplitRows) -> PreparedRows:
        """Prepares each row by itself, since a row's result does not depend on the others."""
        good = np.zeros(len(rows.row_ids), np.bool_)
        prepared: list[Array] = []
        left_out: list[LeftOut] = []
        for place, row_id in enumerate(rows.row_ids.tolist()):
            table = rows.table.slice(place, 1)
            try:
                made, bad = self._prepare(batch_of(table))
                why = f"{CHAIN}: {_problem_text(bad[0])}" if bad else ""
            except InvalidArgument as error:
                why = f"{error.path}: {error.problem}" if isinstance(error, RowError) else error.message
            if why:
                left_out.append(LeftOut(row_id, why, excerpt(table.select(self.kept), 0)))
            else:
                prepared.append(made)
                good[place] = True
        return PreparedRows(where(rows, good), np.concatenate(prepared) if prepared else np.empty(0), left_out)


def where(rows: SplitRows, good: NDArray[np.bool_]) -> SplitRows:
    return SplitRows(rows.split, rows.table.filter(pa.array(good)).combine_chunks(), rows.row_ids[good])


def _problem_text(bad: BadRow) -> str:
    names = ", ".join(map(repr, bad.columns))
    return f"column {names}: {bad.problem}"


@dataclass(frozen=True)
class Predictor:
    """The `RowMaker` of predictions: the kept columns and the predictions.

    Loads the model with the first rows, and keeps it.
    """

    preparer: Preparer
    checkpoint: CheckpointRef
    predictions: PredictionColumns
    workers: Workers
    schema: pa.Schema

    @property
    def source(self) -> VersionRows:
        return self.preparer.source

    def rows(self, part: PartitionRange) -> Iterator[TransformedRows]:
        run = self._model
        set_threads(self.workers.cpus)
        for one in self.preparer.prepared(part):
            table = one.rows.table.select(self.preparer.kept)
            if table.num_rows:
                outputs = _fitting(run, one.prepared)
                yield TransformedRows(
                    part.split, self._with_predictions(table, outputs), one.rows.row_ids, one.left_out
                )
            else:
                yield TransformedRows(part.split, self.schema.empty_table(), one.rows.row_ids, one.left_out)

    def _with_predictions(self, table: pa.Table, outputs: Sequence[NDArray[np.generic]]) -> pa.Table:
        return pa.Table.from_arrays([*table.columns, *self.predictions.arrays(outputs)], schema=self.schema)

    @cached_property
    def _model(self) -> LoadedModel:
        """Loads the model.

        Raises `DataLoss` for a damaged checkpoint, and `FailedPrecondition` if the model does not load.
        """
        found = load_checkpoint(open_store(self.source.settings), self.checkpoint.folder, self.checkpoint.sha256)
        if found.content.model.is_own:
            # Only in this Ray worker: the service that created the job has checked that such code may run.
            load_code(open_store(self.source.settings), found.content.model.code_bundle)
        from shared.models.loaded import LoadedModel

        device = _device(self.workers)
        logger.info("loading %s on %s", self.checkpoint.name, device)
        return LoadedModel(found, device)


def _fitting(run: LoadedModel, prepared: Array) -> Sequence[NDArray[np.generic]]:
    import torch

    try:
        return run(prepared)
    except torch.OutOfMemoryError as error:
        raise ResourceExhausted(
            f"{len(prepared)} rows do not fit into the memory of a GPU; use a smaller workers.batch_size, or more of a "
            "GPU for each worker",
            reason="GPU_OUT_OF_MEMORY",
        ) from error


def set_threads(threads: int) -> None:
    """Sets torch's thread count for each part, since OpenMP keeps it per calling thread.

    The last bits of outputs depend on it.
    """
    import torch

    torch.set_num_threads(threads)


def _device(workers: Workers) -> str:
    import torch

    if not workers.gpus:
        return "cpu"
    if not torch.cuda.is_available():
        raise FailedPrecondition(
            "workers.gpus: Ray gave the worker a GPU, but torch finds none there; install torch for it on that node",
            reason="NO_GPU",
            fields=[("workers.gpus", "torch finds no GPU")],
        )
    # The same rows must give the same bytes again.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # The precision of the CPU, so that predictions are close to a deployment's answers.
    torch.backends.cudnn.allow_tf32 = False
    return "cuda"
