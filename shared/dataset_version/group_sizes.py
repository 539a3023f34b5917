"""How much memory row groups take once they are read, as far as footers and the manifest tell.

Footers tell of each column how much its pages hold, and of a text that many rows share they hold one. How much is
hidden so is known of a file as a whole: the writer counts the bytes of its values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared.dataset_version.reader import RowGroup, VersionReader
from shared.dataset_version.row_groups import MAX_UNEQUAL_GROUP_BYTES
from shared.dataset_version.writer import MAX_FILE_BYTES


@dataclass(frozen=True)
class ReadBytes:
    """Of groups that are read together: `told` by footers, besides what is expected to be hidden, and what may be."""

    told: int = 0
    expected_hidden: int = 0
    may_be_hidden: int = 0
    # By file, what all its groups hide together.
    files: Mapping[int, int] = field(default_factory=dict)

    def __add__(self, other: ReadBytes) -> ReadBytes:
        return ReadBytes(
            self.told + other.told,
            self.expected_hidden + other.expected_hidden,
            self.may_be_hidden + other.may_be_hidden,
            {**self.files, **other.files},
        )

    @property
    def expected(self) -> int:
        """Where the groups of a file hide as much as others do."""
        return self.told + self.expected_hidden

    @property
    def most(self) -> int:
        """Where they are those that hide the most."""
        return self.told + min(self.may_be_hidden, sum(self.files.values()))


class GroupSizes:
    """Of some columns of a version (None: all but `_row_id`). Raises as `VersionReader.read`."""

    def __init__(self, reader: VersionReader, columns: Sequence[str] | None = None) -> None:
        wanted = frozenset(reader.select(columns).names)
        self._reader = reader
        self._places = [place for place, name in enumerate(reader.schema.names) if name in wanted]
        # By file, of all its groups and of one on the average.
        self._hidden: dict[int, tuple[int, int]] = {}

    def told(self, group: RowGroup) -> int:
        """About how many bytes those are, if no text is there twice."""
        if not self._places:
            return 0
        footer = self._reader.footer(group.file_index).row_group(group.group_index)
        return sum(footer.column(place).total_uncompressed_size for place in self._places)

    def of(self, group: RowGroup) -> ReadBytes:
        """With texts that many rows share as often as they are there."""
        footer = self._reader.footer(group.file_index).row_group(group.group_index)
        told = texts = 0
        for place in self._places:
            column = footer.column(place)
            told += column.total_uncompressed_size
            if column.has_dictionary_page:
                texts += column.total_uncompressed_size
        if not texts:
            return ReadBytes(told)
        # No row has more than the whole dictionary.
        most = max(min(texts * group.row_count, MAX_UNEQUAL_GROUP_BYTES) - texts, 0)
        of_file, on_average = self._hidden_in(group.file_index)
        return ReadBytes(told, min(on_average, most), most, {group.file_index: of_file})

    def _hidden_in(self, file_index: int) -> tuple[int, int]:
        """Its footer tells of how many of a file's values, of which there are at most `MAX_FILE_BYTES` where the
        manifest does not count them."""
        if file_index not in self._hidden:
            footer = self._reader.footer(file_index)
            groups = range(footer.num_row_groups)
            told = sum(footer.row_group(index).total_byte_size for index in groups)
            counted = self._reader.version.manifest.files[file_index].raw_bytes
            hidden = max((MAX_FILE_BYTES if counted is None else counted) - told, 0)
            self._hidden[file_index] = hidden, hidden // len(groups)
        return self._hidden[file_index]
