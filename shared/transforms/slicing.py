"""The part of a chain of steps that some columns depend on: a walk backward over what each step reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.transforms.schema import Schema
from shared.transforms.steps.columns import Drop, Select
from shared.transforms.steps.step import Names, Step

# The index that a step has in the chain, and what is left of it.
Sliced = list[tuple[int, Step]]


def needed_columns(
    steps: Sequence[Step], schemas: Sequence[Schema], outputs: Names, taps: Mapping[int, Names] | None = None
) -> list[Names]:
    """What is needed before each step and, last, after all: len(steps) + 1 sets.

    `schemas[i]` are the columns before step i; `taps` are columns needed before a step beside what `outputs` need.
    """
    needed = [outputs]
    for index in range(len(steps) - 1, -1, -1):
        sources = steps[index].sources(needed[-1], schemas[index])
        needed.append(sources | (taps or {}).get(index, frozenset()))
    return needed[::-1]


def sliced(steps: Sequence[Step], schemas: Sequence[Schema], needed: Sequence[Names]) -> Sliced:
    """The steps, narrowed to what is needed (of `needed_columns`), from the columns `needed[0]` alone.

    Columns are dropped as soon as nothing needs them any more, so names that the whole chain takes away and gives again
    cannot meet. Steps added to drop columns carry the index of the step that they follow.
    """
    part: Sliced = []
    present = {name: one for name, one in schemas[0].items() if name in needed[0]}
    if len(present) < len(schemas[0]):
        part.append((0, Select(tuple(present))))
    for index, step in enumerate(steps):
        narrowed = step.narrowed(needed[index + 1], schemas[index])
        if narrowed is not None:
            part.append((index, narrowed))
            present = narrowed.output(present)
        dead = tuple(name for name in present if name not in needed[index + 1])
        if dead:
            part.append((index, Drop(dead)))
            present = {name: one for name, one in present.items() if name not in dead}
    return part
