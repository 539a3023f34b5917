"""A specification as it is being chosen, with the reason for each choice, and the version that it needs first.

It is in the JSON form of `millrace.train.v1.TrainingSpec`, with field names as the contract spells them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any


@dataclass(frozen=True)
class Choice:
    field: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Arguments of TransformVersion. `steps` is JSON of its transform's steps; `shares` are weights of a RatioSplit."""

    source: str
    steps: Sequence[Mapping[str, Any]]
    shares: Mapping[str, float]
    seed: int
    fit_split: str

    @property
    def request_id(self) -> str:
        """A UUID4 in form, the same for the same preparation."""
        body = [self.source, self.steps, self.shares, self.seed, self.fit_split]
        digest = sha256(json.dumps(body, sort_keys=True).encode()).digest()
        return str(uuid.UUID(bytes=digest[:16], version=4))


@dataclass
class Suggestion:
    spec: dict[str, Any]
    choices: list[Choice] = field(default_factory=list)
    preparation: Preparation | None = None

    def choose(self, path: str, value: Any, reason: str, shown: str = "") -> None:
        """Sets a field, at most one message deep, unless it was given."""
        outer, _, inner = path.rpartition(".")
        message = self.spec.setdefault(outer, {}) if outer else self.spec
        if inner not in message:
            message[inner] = value
            self.choices.append(Choice(path, shown or str(value), reason))

    def note(self, path: str, value: str, reason: str) -> None:
        self.choices.append(Choice(path, value, reason))
