"""Learning byte pairs: which neighbouring symbols of words become one, the most frequent first.

The method is that of Sennrich, Haddow and Birch, 2016. The library `tokenizers` can learn them too, but from texts
alone, in one process; here the counts of words suffice, which several processes can take and add. A tie goes to the
pair that is first in the order of code points, so the same counts give the same pairs.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

Pair = tuple[str, str]

# Fewer occurrences tell nothing.
MIN_COUNT = 2


def learn_merges(words: Sequence[str], counts: Sequence[int], limit: int) -> list[Pair]:
    """At most `limit` pairs of symbols, in the order in which they are to be merged; symbols are strings, at first
    single characters. `counts` says how often each of the words, which are distinct, occurs.

    The result does not depend on the order of the words.
    """
    texts = _Texts(words, counts)
    merges: list[Pair] = []
    while len(merges) < limit and (pair := texts.most_frequent()) is not None:
        texts.merge(pair)
        merges.append(pair)
    return merges


class _Texts:
    """The words as symbols, with the count of each pair of neighbours and the words where it may be."""

    def __init__(self, words: Sequence[str], counts: Sequence[int]) -> None:
        self._symbols = [list(word) for word in words]
        self._times = list(counts)
        self._counts: defaultdict[Pair, int] = defaultdict(int)
        # A word stays here when it has the pair no longer.
        self._where: defaultdict[Pair, set[int]] = defaultdict(set)
        for index, symbols in enumerate(self._symbols):
            for pair in pairwise(symbols):
                self._counts[pair] += self._times[index]
                self._where[pair].add(index)
        # Each pair has an entry of its count, or of one that it had before it fell.
        self._heap = [(-count, pair) for pair, count in self._counts.items()]
        heapq.heapify(self._heap)

    def most_frequent(self) -> Pair | None:
        """None where no pair occurs often enough."""
        while self._heap:
            negative, pair = heapq.heappop(self._heap)
            count = self._counts[pair]
            if count == -negative:
                return pair if count >= MIN_COUNT else None
            if MIN_COUNT <= count < -negative:
                heapq.heappush(self._heap, (-count, pair))
        return None

    def merge(self, pair: Pair) -> None:
        """Makes one symbol of each occurrence, from the left."""
        risen: set[Pair] = set()
        for index in self._where.pop(pair):
            risen |= self._merge_in_word(index, pair)
        for one in risen:
            heapq.heappush(self._heap, (-self._counts[one], one))

    def _merge_in_word(self, index: int, pair: Pair) -> set[Pair]:
        """The pairs that occur more often than before."""
        symbols, times, counts = self._symbols[index], self._times[index], self._counts
        merged: list[str] = []
        risen: set[Pair] = set()
        place, end = 0, len(symbols)
        while place < end:
            if place + 1 == end or symbols[place] != pair[0] or symbols[place + 1] != pair[1]:
                merged.append(symbols[place])
                place += 1
                continue
            counts[pair] -= times
            symbol = pair[0] + pair[1]
            if merged:
                counts[merged[-1], pair[0]] -= times
                counts[merged[-1], symbol] += times
                risen.add((merged[-1], symbol))
            if place + 2 < end:
                counts[pair[1], symbols[place + 2]] -= times
                counts[symbol, symbols[place + 2]] += times
                risen.add((symbol, symbols[place + 2]))
            merged.append(symbol)
            place += 2
        self._symbols[index] = merged
        for one in risen:
            self._where[one].add(index)
        return risen
