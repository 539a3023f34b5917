"""Byte pairs: which are learnt, in which order, and that nothing but the counts decides."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from shared.transforms.steps.tokenizing import fit_merges

# Of the paper that proposed them.
WORDS = {"low": 5, "lower": 2, "newest": 6, "widest": 3}


def fitted(words: dict[str, int], limit: int) -> list[tuple[str, str]]:
    return fit_merges(list(words), list(words.values()), limit)


def test_the_most_frequent_pair_comes_first_and_a_tie_goes_to_the_first_in_order() -> None:
    # e+s and s+t occur nine times, l+o and o+w seven.
    assert fitted(WORDS, 5) == [("e", "s"), ("es", "t"), ("l", "o"), ("lo", "w"), ("e", "w")]


def test_the_order_of_words_does_not_matter() -> None:
    drawn = random.Random(3)
    words = {"".join(drawn.choices("abcd", k=drawn.randint(1, 9))): drawn.randint(1, 50) for _ in range(300)}
    expected = fitted(words, 200)
    shuffled = list(words.items())
    drawn.shuffle(shuffled)

    assert len(expected) == 200
    assert fitted(dict(shuffled), 200) == expected


def test_counting_as_it_goes_gives_what_counting_anew_gives() -> None:
    drawn = random.Random(5)
    words = {"".join(drawn.choices("ab", k=drawn.randint(1, 12))): drawn.randint(1, 9) for _ in range(60)}
    texts = {word: list(word) for word in words}
    for pair in fitted(words, 40):
        counts: Counter[tuple[str, str]] = Counter()
        for word, symbols in texts.items():
            for one in pairwise(symbols):
                counts[one] += words[word]
        assert pair == min(counts, key=lambda one: (-counts[one], one))
        for symbols in texts.values():
            place = 0
            while place + 1 < len(symbols):
                if (symbols[place], symbols[place + 1]) == pair:
                    symbols[place : place + 2] = ["".join(pair)]
                place += 1


@pytest.mark.parametrize(
    ("words", "merges"), [({}, []), ({"a": 9}, []), ({"ab": 1}, []), ({"aaa": 2}, [("a", "a"), ("aa", "a")])]
)
def test_pairs_that_occur_once_are_not_learnt(words: dict[str, int], merges: list[tuple[str, str]]) -> None:
    assert fitted(words, 10) == merges
