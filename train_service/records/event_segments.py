"""The log of a run's events, and the segments that readers have instead of its records.

    {folder}/log/{number:012d}.json                a record, as `ResourceLog` writes it
    {folder}/log/newest                            the number of a recent one
    {folder}/gathered/{index:09d}.{id}.json.z      SEGMENT_RECORDS records, from index * SEGMENT_RECORDS + 1 on

A run appends a record about each second. While its job lives all records stay: they are the truth, and put-if-absent
on the next number fences attempts. A segment is a copy of its records that is read with one request. Its key names the
last of them, so it is found only where that record is there. A segment that is missing or damaged costs only requests.

Once the job has ended, `gather_ended` deletes the records of each segment but the last. It deletes what was listed
before a moment at which the job had ended. Later attempts begin behind that, and readers find the segment before they
look for a record.

    {folder}/segments/{index:09d}.json.z           a segment of an earlier release, which may have no records any more
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from shared.durable import fields_of
from shared.errors import DataLoss
from shared.log import Record, ResourceLog, State
from shared.storage import ObjectMissing, ObjectStore

logger = logging.getLogger(__name__)

SEGMENT_RECORDS = 256
# Records or segments that are read at a time to be gathered.
READ_AT_ONCE = 8
# Segments whose records are deleted together: as many as one request to S3 deletes.
SEGMENTS_AT_ONCE = 3
# How often a reader looks for a record and for its segment, which is written before the record is deleted.
TRIES = 3
# What reading an object raises that is not as it was written.
DAMAGE = (zlib.error, ValueError, TypeError, AttributeError)


class SegmentedLog(ResourceLog):
    """A resource log below `{folder}/log`. Not shared between threads; keep one for repeated reads."""

    def __init__(self, store: ObjectStore, folder: str) -> None:
        super().__init__(store, f"{folder}/log", is_long=True)
        self._records_folder = f"{folder}/log"
        self._segments_folder = f"{folder}/gathered"
        self._earlier_folder = f"{folder}/segments"
        # The segment that was read last, its records, and the size of their JSON. 0 if none is held.
        self._segment: tuple[int, list[Record]] = (-1, [])
        self.segment_bytes = 0
        # The segment that was looked for and cannot be read, so that its records are read one by one.
        self._not_gathered = -1
        # The segments of an earlier release; None before the first look.
        self._earlier: frozenset[int] | None = None

    def read(self, number: int) -> Record | None:
        """Return the record with that number, or None if it has not been written.

        Raises `DataLoss` if it is damaged, or only its segment is left and is damaged.
        """
        index, place = divmod(number - 1, SEGMENT_RECORDS)
        is_missing = False
        if index == self._not_gathered:
            if (record := self.read_record(number)) is not None:
                return record
            is_missing = True
        for _ in range(TRIES):
            is_complete = index == self._segment[0] or self._find_segment(index)
            if index == self._segment[0]:
                return self._segment[1][place]
            if is_missing and not is_complete:
                return None  # no record of it was deleted before we looked for this one
            if (record := self.read_record(number)) is not None:
                return record
            is_missing = True
        raise DataLoss(
            f"event {number} of {self._records_folder} is damaged: neither its record nor its segment can be read",
            metadata={"object": self._key(number)},
        )

    def read_record(self, number: int) -> Record | None:
        """Return the record with that number if it is an object of its own. One request.

        While a job lives these are all records. Raises `DataLoss`.
        """
        try:
            return super().read(number)
        except DAMAGE as error:
            key = self._key(number)
            raise DataLoss(f"the event in {key} is damaged: {error}", metadata={"object": key}) from None

    def head(self) -> Record | None:
        """Return the newest record, or None if there is none.

        The search reads last records of segments, and then records of the segment that is not complete. These are never
        deleted, so neither a missing nor a damaged segment matters. A newest record that is damaged is returned without
        a state, so that the log goes on behind it.
        """
        newest = self._head or self._hinted(0)
        try:
            while True:
                newest = self._last_of_complete(newest.number // SEGMENT_RECORDS if newest else 0) or newest
                index = newest.number // SEGMENT_RECORDS if newest else 0
                newest = self._newest_in(index, newest)
                if newest is None or newest.number < numbers_of(index)[-1]:
                    break  # else the segment was completed meanwhile
            self._head = self._with_state(newest)
            return self._head
        finally:
            self.forget_segment()

    def forget_segment(self) -> None:
        """Free the memory of the segment that was read last, and look for segments anew."""
        self._segment = (-1, [])
        self.segment_bytes = 0
        self._not_gathered = -1
        self._earlier = None

    def is_at_hand(self, number: int) -> bool:
        """Return whether `read` returns that record without a request."""
        return (number - 1) // SEGMENT_RECORDS == self._segment[0]

    def add(self, state: State, attempt: int, nonce: str) -> None:
        """Append a state that does not depend on the one before, as `update` does.

        It takes one request where this log wrote the newest record.
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

    # --- The newest record ---

    def _hinted(self, known: int) -> Record | None:
        number = self._hinted_number(known)
        if number is None:
            return None
        # The record may be gathered. The last one of its segment is there then.
        return self._probe(number) or self._last_of((number - 1) // SEGMENT_RECORDS)

    def _last_of_complete(self, index: int) -> Record | None:
        """Return the last record of the last complete segment from `index` on. None if `index` is not complete."""
        newest, low, step = None, index - 1, 1
        while (found := self._last_of(low + step)) is not None:
            newest, low, step = found, low + step, step * 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if (found := self._last_of(middle)) is not None:
                newest, low = found, middle
            else:
                high = middle
        return newest

    def _newest_in(self, index: int, newest: Record | None) -> Record | None:
        """Return the newest record up to the end of a segment that was not complete, or `newest` if none is later."""
        low, end, step = max(newest.number if newest else 0, index * SEGMENT_RECORDS), numbers_of(index)[-1], 1
        while low + step <= end and (found := self._probe(low + step)) is not None:
            newest, low, step = found, low + step, step * 2
        high = min(low + step, end + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if (found := self._probe(middle)) is not None:
                newest, low = found, middle
            else:
                high = middle
        return newest

    def _last_of(self, index: int) -> Record | None:
        """Return the last record of a segment, perhaps without its state. None if the segment is not complete."""
        number = numbers_of(index)[-1]
        return self._probe(number) or (_unreadable(number) if index in self._earlier_segments() else None)

    def _probe(self, number: int) -> Record | None:
        """Return the record if it is an object of its own; a damaged one without its state."""
        try:
            return self.read_record(number)
        except DataLoss as error:
            logger.warning("%s", error.message)
            return _unreadable(number)

    def _with_state(self, newest: Record | None) -> Record | None:
        """Return the newest record with its state, if that is in a segment of an earlier release."""
        if newest is None or newest.nonce or newest.number % SEGMENT_RECORDS:
            return newest
        try:
            return self.read(newest.number) or newest
        except DataLoss as error:
            logger.warning("%s", error.message)
            return newest

    # --- Segments ---

    def _find_segment(self, index: int) -> bool:
        """Read a segment, or note that its records are to be read. Returns whether the segment is complete."""
        last, records = self._probe(numbers_of(index)[-1]), None
        if last is not None and last.nonce:
            records = self._readable(self._segment_key(last), last)
        if records is None and index in self._earlier_segments():
            records = self._readable(self._earlier_key(index), last)
        if records is None:
            self._not_gathered = index
        else:
            self._segment = (index, records)
        return records is not None or last is not None or index in self._earlier_segments()

    def _readable(self, key: str, last: Record | None) -> list[Record] | None:
        """Return the records of a segment whose last one is `last`, if that is known. None if it cannot be read."""
        try:
            content = zlib.decompress(self._store.get(key))
            records = [Record(**fields_of(Record, state)) for state in json.loads(content)]
        except ObjectMissing:
            return None
        except DAMAGE as error:
            logger.warning("the events in %s are damaged: %s", key, error)
            return None
        index = _number_in(key)
        if [record.number for record in records] != list(numbers_of(index)):
            logger.warning("the events in %s are damaged: some are missing", key)
            return None
        if last is not None and last.nonce and last.nonce != records[-1].nonce:
            return None  # of a deleted job that had this name
        self.segment_bytes = len(content)
        return records

    def _earlier_segments(self) -> frozenset[int]:
        """Return the segments of an earlier release. It did not delete a record until minutes after its segment."""
        if self._earlier is None:
            self._earlier = frozenset(_number_in(info.key) for info in self._store.list(self._earlier_folder))
        return self._earlier

    def _segment_key(self, last: Record) -> str:
        """Return the key of the segment with that last record, which no other log of this name has."""
        identity = hashlib.sha256(f"{last.attempt} {last.nonce}".encode()).hexdigest()[:16]
        return f"{self._segments_folder}/{last.number // SEGMENT_RECORDS - 1:09d}.{identity}.json.z"

    def _earlier_key(self, index: int) -> str:
        return f"{self._earlier_folder}/{index:09d}.json.z"


class GatheringLog(SegmentedLog):
    """A log that also gathers its records: the one of the run's reporter, or of a process that tidies up."""

    def __init__(self, store: ObjectStore, folder: str) -> None:
        super().__init__(store, folder)
        # The newest records that this log wrote, by number.
        self._recent: dict[int, Record] = {}
        # The segment that is written next, and the later ones that are there. None before the first look.
        self._next: int | None = None
        self._there: frozenset[int] = frozenset()

    def append(self, previous: Record | None, state: State, attempt: int = 0, nonce: str = "") -> Record | None:
        record = super().append(previous, state, attempt, nonce)
        if record is not None:
            self._recent[record.number] = record
            while len(self._recent) > 2 * SEGMENT_RECORDS:
                del self._recent[min(self._recent)]
        return record

    def gather(self) -> None:
        """Write the next segment, where its records are all there. Those that cannot be read stay without one."""
        if self._head is None:
            return
        if self._next is None:
            written = (_number_in(info.key) for info in self._store.list(self._segments_folder))
            self._next, self._there = 0, frozenset(written) | self._earlier_segments()
        while self._next in self._there:
            self._next += 1
        if self._head.number >= (self._next + 1) * SEGMENT_RECORDS:
            self._gathers(self._next)
            self._next += 1

    def gather_ended(self, remove: Callable[[Sequence[str]], bool]) -> None:
        """Write the segments that are missing, and delete the records that are in one, but for the last of each.

        The job has ended. `remove` deletes objects that were listed before it is called. It returns whether it did:
        not if the job has changed. What is left, also by a process that died, is deleted by the next call.
        """
        records: dict[int, list[str]] = {}
        for info in self._store.list(self._records_folder):
            if info.key.endswith(".json"):
                records.setdefault((_number_in(info.key) - 1) // SEGMENT_RECORDS, []).append(info.key)
        due: dict[int, list[str]] = {}
        for index, keys in sorted(records.items()):
            last = self._key(numbers_of(index)[-1])
            if len(keys) > 1 and last in keys and index not in self._earlier_segments():
                due[index] = [key for key in keys if key != last]
        while due:
            some = [(index, due.pop(index)) for index in list(due)[:SEGMENTS_AT_ONCE]]
            keys = [key for index, keys in some if self._is_gathered(index) for key in keys]
            if keys and not remove(keys):
                return

    def _is_gathered(self, index: int) -> bool:
        """Return whether the segment can be read, which is written if it cannot."""
        last = self._probe(numbers_of(index)[-1])
        if last is None or not last.nonce:
            return False
        return self._readable(self._segment_key(last), last) is not None or self._gathers(index)

    def _gathers(self, index: int) -> bool:
        try:
            self._write_segment(index)
        except DataLoss as error:
            logger.warning("events of %s stay in records of their own: %s", self._records_folder, error.message)
            return False
        return True

    def _write_segment(self, index: int) -> None:
        """Write a segment, also over a damaged one: all writers of a key write the same."""
        numbers = numbers_of(index)
        last = self._recent.get(numbers[-1])
        if last is None:
            # Another process wrote it. It may be another job's that has the name by now, so what we remember may not be
            # in its log. That log has all records before this one.
            last, own = self.read_record(numbers[-1]), {}
        else:
            own = self._recent

        def record(number: int) -> Record | None:
            return own.get(number) or self.read_record(number)

        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            records = [one for one in pool.map(record, numbers[:-1]) if one is not None]
        if last is None or len(records) < SEGMENT_RECORDS - 1:
            raise DataLoss(f"the events {numbers[0]} to {numbers[-1]} are not all there")
        data = zlib.compress(json.dumps([asdict(one) for one in (*records, last)]).encode())
        self._store.put(self._segment_key(last), data)
        for number in numbers:
            self._recent.pop(number, None)


def numbers_of(index: int) -> range:
    """Return the numbers of a segment's records."""
    return range(index * SEGMENT_RECORDS + 1, (index + 1) * SEGMENT_RECORDS + 1)


def _unreadable(number: int) -> Record:
    """Return what stands for a record that is there, and whose state is not known."""
    return Record(number, "", 0, 0.0, {})


def _number_in(key: str) -> int:
    return int(key.rsplit("/", 1)[-1].split(".")[0])
