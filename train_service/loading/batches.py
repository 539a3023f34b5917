"""Who reads the rows of a run and makes batches of them: the parts of a loader, put together from a specification."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.dataset_version import DatasetVersion, VersionReader
from shared.dataset_version.reader import Footers
from shared.storage import ObjectStore
from train_service.domain.order import SlicePlan
from train_service.domain.spec import TrainingSpec
from train_service.loading.loader import Loader
from train_service.loading.preprocessing import Preprocessing
from train_service.loading.row_cache import RowCache

# Of large rows it must hold the row group that each lane of a rank is in, and the next: 24 of 20 MiB, twice.
CACHE_BYTES = 1024 * 1024 * 1024
# Each lane is in a file of its own: were there no room for all their footers, every window would parse them anew. Those
# of 24 lanes take 640 MiB where rows have a hundred columns of doubles, and 20 MiB where they are small images.
FOOTER_BYTES = 768 * 1024 * 1024


class Batches:
    """The rows of a run's version, as one of its ranks reads them."""

    def __init__(self, store: ObjectStore, version: DatasetVersion, spec: TrainingSpec) -> None:
        """Raises `InvalidArgument` where the transform does not fit the version."""
        self.preprocessing = Preprocessing(spec, version.columns)
        self._spec = spec
        self._store = store
        self._version = version

    def labels(self, touched: Callable[[], None] = lambda: None) -> RowCache:
        """The labels of the train split, without any other column."""
        return self.cache(self._spec.train_split, touched, columns=[])

    def cache(
        self, split: str, touched: Callable[[], None] = lambda: None, *, columns: Sequence[str] | None = None
    ) -> RowCache:
        """`touched` is called whenever rows are asked for; `columns` are those that the transform reads."""
        spec, columns = self._spec, self.preprocessing.columns if columns is None else columns
        reader = VersionReader(self._store, self._version, Footers(FOOTER_BYTES))
        cache = RowCache(
            reader,
            split,
            columns,
            spec.label_column,
            spec.model.num_classes,
            CACHE_BYTES,
            spec.task,
            allow_non_finite=spec.allow_non_finite,
        )
        cache.touched = touched
        return cache

    def plan(self, rank: int, world_size: int) -> SlicePlan:
        spec = self._spec
        return SlicePlan(spec.seed, spec.lanes, spec.global_batch_size, spec.epochs, rank, world_size, spec.window_rows)

    def loader(
        self, rank: int, world_size: int, touched: Callable[[], None] = lambda: None, *, for_device: bool = False
    ) -> Loader:
        """Of the train split, read by threads of this process."""
        cache = self.cache(self._spec.train_split, touched)
        return Loader(cache, self.preprocessing, self.plan(rank, world_size), for_device=for_device)
