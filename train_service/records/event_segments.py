"""The log of a run's events, whose older records are gathered into segments.

    {folder}/log/{number:012d}.json          a record, as `ResourceLog` writes it
    {folder}/log/newest                      the number of a recent one
    {folder}/segments/{index:09d}.json.z     SEGMENT_RECORDS records, from index * SEGMENT_RECORDS + 1 on

A run appends a record about each second. Once a segment's records are all there, the run writes the segment, and
`KEPT_S` later it deletes the records. So a log of n records is n / SEGMENT_RECORDS objects and some hundred records,
and is read a segment at a time.

A place in the log is free again once its record is deleted, so put-if-absent alone no longer says that a place is new.
A reader or writer therefore looks whether there is a segment, and does so before its last look is `KEPT_S` old: no
record is deleted sooner after its segment was written. What was found or not found at a place since then is thus true.
Only intervals are compared, each by the clock of one process.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from shared.durable import fields_of
from shared.errors import DataLoss
from shared.log import Record, ResourceLog, StaleAttempt, State
from shared.storage import ObjectExists, ObjectMissing, ObjectStore

logger = logging.getLogger(__name__)

SEGMENT_RECORDS = 256
# How long after its segment a record is deleted.
KEPT_S = 300.0
# How long ago a reader or writer may have missed a segment to go on without another look, and to trust what it has
# found since. The second is less than `KEPT_S`, as clocks differ in speed.
ABSENT_S = 200.0
TRUSTED_S = 240.0
# Records of lost attempts that are read at a time to be gathered.
READ_AT_ONCE = 8
# What reading an object raises that is not as it was written.
DAMAGE = (zlib.error, ValueError, TypeError, AttributeError)


class SegmentedLog(ResourceLog):
    """A resource log below `{folder}/log`. Not shared between threads; keep one for repeated reads.

    `clock` returns monotonic seconds.
    """

    def __init__(self, store: ObjectStore, folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(store, f"{folder}/log", is_long=True)
        self._records_folder = f"{folder}/log"
        self._segments_folder = f"{folder}/segments"
        self._clock = clock
        # The segment that was read last, its records, and the size of their JSON. 0 if none is held.
        self._segment: tuple[int, list[Record]] = (-1, [])
        self.segment_bytes = 0
        # The segment that was missed last, and when its absence was asked for.
        self._absent = (-1, 0.0)

    def read(self, number: int) -> Record | None:
        """Return the record with that number, or None if it has not been written.

        Raises `DataLoss` if it is damaged, or only its segment is left and is damaged.
        """
        index, place = divmod(number - 1, SEGMENT_RECORDS)
        while True:
            try:
                records = self._records_of(index)
            except DataLoss:
                if (record := self._read_record(number)) is not None:
                    return record
                raise
            if records is not None:
                return records[place]
            record = self._read_record(number)
            if self._was_absent(index, TRUSTED_S):
                return record

    def head(self) -> Record | None:
        try:
            return super().head()
        except DataLoss:
            # Begin behind what is damaged, with a recent record, if this log knows of no later one.
            hinted = self._hinted(self._head.number if self._head else 0)
            if hinted is None:
                raise
            self._head = hinted
            return super().head()
        finally:
            self.forget_segment()

    def forget_segment(self) -> None:
        """Free the memory of the segment that was read last. Those who keep a log rarely need it again."""
        self._segment = (-1, [])
        self.segment_bytes = 0

    def is_at_hand(self, number: int) -> bool:
        """Return whether `read` returns that record without a request."""
        return (number - 1) // SEGMENT_RECORDS == self._segment[0]

    def add(self, state: State, attempt: int, nonce: str) -> None:
        """Append a state that does not depend on the one before, as `update` does.

        It takes one request where this log wrote the newest record within `TRUSTED_S`.
        """
        newest = self._head
        if (
            newest is not None
            and newest.attempt == attempt
            and self._unanswered <= newest.number
            and self.append(newest, state, attempt, nonce) is not None
        ):
            return
        self.update(lambda _: state, attempt=attempt, nonce=nonce)

    def append(self, previous: Record | None, state: State, attempt: int = 0, nonce: str = "") -> Record | None:
        record = super().append(previous, state, attempt, nonce)
        if record is None:
            return None
        try:
            return self._without_segment(previous, record)
        except StaleAttempt:
            raise
        except Exception:
            # The record may count, so a repeated call has to look for it before it writes another.
            self._head, self._unanswered = previous, record.number
            raise

    def _without_segment(self, previous: Record | None, record: Record) -> Record | None:
        """Return the record that was just written. If its place is in a segment, remove it, and return None."""
        index, place = divmod(record.number - 1, SEGMENT_RECORDS)
        if self._was_absent(index, TRUSTED_S) or (records := self._records_of(index)) is None:
            return record
        there = records[place]
        if there.nonce == record.nonce:
            return record
        if place and previous is not None and _is_of_later_job(previous, records[place - 1]):
            self._delete_segment(index)
            return record
        # The place was taken long ago, and was free only because its record was deleted. No reader has seen ours.
        self._store.delete(self._key(record.number))
        self._head = records[-1]
        if there.attempt > record.attempt:
            fenced = f"attempt {record.attempt} is fenced by attempt {there.attempt}"
            raise StaleAttempt(f"{self._records_folder}: {fenced}")
        return None

    def _was_absent(self, index: int, max_age_s: float) -> bool:
        return self._absent[0] == index and self._clock() - self._absent[1] < max_age_s

    def _records_of(self, index: int) -> list[Record] | None:
        """Return the records of a segment, or None if it was not there at a time less than `ABSENT_S` ago."""
        if self._segment[0] == index:
            return self._segment[1]
        if self._was_absent(index, ABSENT_S):
            return None
        asked_at = self._clock()
        records = self._read_segment(index)
        if records is None:
            self._absent = (index, asked_at)
        else:
            self._segment = (index, records)
        return records

    def _read_record(self, number: int) -> Record | None:
        """Return the record with that number if it is an object of its own."""
        try:
            return super().read(number)
        except DAMAGE as error:
            key = self._key(number)
            raise DataLoss(f"the event in {key} is damaged: {error}", metadata={"object": key}) from None

    def _read_segment(self, index: int) -> list[Record] | None:
        key = self._segment_key(index)
        try:
            content = zlib.decompress(self._store.get(key))
            self.segment_bytes = len(content)
            states = json.loads(content)
            records = [Record(**fields_of(Record, state)) for state in states]
        except ObjectMissing:
            return None
        except DAMAGE as error:
            raise DataLoss(f"the events in {key} are damaged: {error}", metadata={"object": key}) from None
        if [record.number for record in records] != list(numbers_of(index)):
            raise DataLoss(f"the events in {key} are damaged: some are missing", metadata={"object": key})
        return records

    def _delete_segment(self, index: int) -> None:
        """Delete a segment with events of a deleted job whose name another job has taken, or may take."""
        logger.warning("%s has events of a deleted job, and is removed", self._segment_key(index))
        self._store.delete(self._segment_key(index))
        self.forget_segment()

    def _segment_key(self, index: int) -> str:
        return f"{self._segments_folder}/{index:09d}.json.z"


class GatheringLog(SegmentedLog):
    """A log that also gathers its records: the one of the run's reporter."""

    def __init__(self, store: ObjectStore, folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(store, folder, clock)
        # The newest records that this log wrote, by number.
        self._recent: dict[int, Record] = {}
        # The first segment that is not written yet; None before the first look.
        self._next: int | None = None
        # Segments whose records are to be deleted, oldest first, and from when on.
        self._due: list[tuple[int, float]] = []

    def append(self, previous: Record | None, state: State, attempt: int = 0, nonce: str = "") -> Record | None:
        record = super().append(previous, state, attempt, nonce)
        if record is not None:
            self._recent[record.number] = record
            while len(self._recent) > 2 * SEGMENT_RECORDS:
                del self._recent[min(self._recent)]
        return record

    def gather(self) -> None:
        """Write the next segment, and delete the records of an earlier one, where that is due.

        Records that cannot be gathered stay as they are.
        """
        if self._head is None:
            return
        if self._next is None:
            self._next = self._first_left()
        if self._head.number >= (self._next + 1) * SEGMENT_RECORDS:
            try:
                self._write_segment(self._next)
                self._due.append((self._next, self._clock() + KEPT_S))
            except DataLoss as error:
                logger.warning("events of %s stay in records of their own: %s", self._records_folder, error.message)
            self._next += 1
        if self._due and self._clock() >= self._due[0][1]:
            try:
                self._delete_records(self._due[0][0])
            except DataLoss as error:
                logger.warning("events of %s stay in records of their own: %s", self._records_folder, error.message)
            del self._due[0]

    def _first_left(self) -> int:
        """Return the number of segments. Records that lost attempts did not delete become due."""
        segments = [_number_in(info.key) for info in self._store.list(self._segments_folder)]
        following = max(segments, default=-1) + 1
        keys = [info.key for info in self._store.list(self._records_folder) if info.key.endswith(".json")]
        gathered = {(_number_in(key) - 1) // SEGMENT_RECORDS for key in keys} & set(segments)
        self._due = [(index, self._clock() + KEPT_S) for index in sorted(gathered)]
        return following

    def _write_segment(self, index: int) -> None:
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            records = list(pool.map(self._record, numbers_of(index)))
        # Not from memory: a deleted job's name may be another job's by now, whose events these are not.
        last = self._read_record(numbers_of(index)[-1])
        written = [record.nonce for record in records if record is not None]
        if last is None or len(written) < len(records) or last.nonce != written[-1]:
            raise DataLoss(f"the events {numbers_of(index)[0]} to {numbers_of(index)[-1]} are not all there")
        data = zlib.compress(json.dumps([asdict(record) for record in records if record is not None]).encode())
        try:
            self._store.put_if_absent(self._segment_key(index), data)
        except ObjectExists:  # of another writer, and with the same records unless its job has taken the name
            if written != [record.nonce for record in self._read_segment(index) or []]:
                raise DataLoss(f"{self._segment_key(index)} has other events") from None
        # The request may have taken long, or this process may have slept. The job may have been deleted meanwhile.
        there = self._read_record(last.number)
        if _is_of_later_job(there, last) if there is not None else not self._has_records_behind(index):
            self._delete_segment(index)
            raise DataLoss(f"the events {numbers_of(index)[0]} to {numbers_of(index)[-1]} are those of a deleted job")
        for number in numbers_of(index):
            self._recent.pop(number, None)

    def _has_records_behind(self, index: int) -> bool:
        """Return whether a record follows a segment. One does if another attempt deleted the segment's records."""
        following = numbers_of(index + 1)[0]
        return self._read_record(following) is not None or self._read_segment(index + 1) is not None

    def _record(self, number: int) -> Record | None:
        # Every thread of `_write_segment` calls this: it changes nothing.
        return self._recent.get(number) or self._read_record(number)

    def _delete_records(self, index: int) -> None:
        records = self._read_segment(index)
        if records is None:
            return
        there = self._read_record(records[0].number)
        if there is None or not _is_of_later_job(there, records[0]):
            self._store.delete_all([self._key(record.number) for record in records])
        elif not self._has_records_behind(index):
            self._delete_segment(index)
        # Else the segment may be all that is left of these events: a process of this job that slept since before they
        # were gathered may have written at a place that was free again.


def numbers_of(index: int) -> range:
    """Return the numbers of a segment's records."""
    return range(index * SEGMENT_RECORDS + 1, (index + 1) * SEGMENT_RECORDS + 1)


def _is_of_later_job(record: Record, gathered: Record) -> bool:
    """Return whether `record` was written by a job that took the name of the one whose record was gathered.

    Its attempts follow those of the deleted job. It may also be of the same job: an attempt that slept may write at a
    place whose record was deleted, and it may be later than the attempt that wrote that record.
    """
    return record.nonce != gathered.nonce and record.attempt > gathered.attempt


def _number_in(key: str) -> int:
    return int(key.rsplit("/", 1)[-1].split(".")[0])
