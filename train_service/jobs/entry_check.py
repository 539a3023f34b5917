"""Whether a bundle's entry can be called at all: tried in a child process, never in the service's own.

The child imports the module, which runs whatever the user wrote at its top level; a script is compiled and not run,
since its top level trains. `Limits` says what it may take;
docs/decisions/0024-own-code.md says what this keeps from it and what not.
"""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path
from typing import Any

from shared.code_bundle import Readable, read_bundle
from shared.code_packing import unpack
from shared.errors import InvalidArgument, ResourceExhausted, invalid_field
from train_service.domain.spec import SCRIPT_SUFFIX
from train_service.jobs.guarded_child import Limits, ask_in_child

FIELD, MODEL_FIELD = "spec.program.entry", "spec.model.entry"
# Each may take as much as `Limits` allows.
MAX_CHILDREN = 2
CHECK_WAIT_S = 60.0
MAX_REMEMBERED = 1_000


class EntryCheck:
    """Of one service. `namespaces`: whether the child gets its own where the kernel grants them."""

    def __init__(self, store: Readable, limits: Limits | None = None, *, namespaces: bool = True) -> None:
        self._store = store
        self._limits = limits or Limits()
        self._namespaces = namespaces
        self._children = threading.BoundedSemaphore(MAX_CHILDREN)
        # What is installed does not change while the service runs, and a bundle never does: a sweep asks once. By the
        # bundle, the entry and what was asked of its model; what was found.
        self._good: dict[tuple[str, str, str], dict[str, Any]] = {}

    def check(self, sha256: str, entry: str) -> None:
        """Raises `InvalidArgument` on `spec.program.entry`, naming the user's file and line where there is one, and
        `ResourceExhausted` where others' checks take too long."""
        self._checked(sha256, entry, None, FIELD)

    def inspect_model(self, sha256: str, entry: str, asked: dict[str, Any]) -> dict[str, Any]:
        """What `own_model_child` finds of the model that the entry makes; `asked` is its question.

        Raises `InvalidArgument` on the field of `spec` that does not work, and `ResourceExhausted` as `check`."""
        return self._checked(sha256, entry, asked, MODEL_FIELD)

    def _checked(self, sha256: str, entry: str, model: dict[str, Any] | None, field: str) -> dict[str, Any]:
        asked = "" if model is None else json.dumps(model, sort_keys=True)
        if (good := self._good.get((sha256, entry, asked))) is not None:
            return good
        if not self._children.acquire(timeout=CHECK_WAIT_S):
            raise ResourceExhausted(
                f"{MAX_CHILDREN} other programs are being checked; try again later", reason="TOO_MANY_PROGRAMS"
            )
        try:
            answer = self._answer(sha256, entry, model)
        finally:
            self._children.release()
        if problem := str(answer["problem"]):
            # A child may answer anything: of what it names only a field of the specification is taken.
            path = str(answer.get("field", ""))
            if path.startswith("spec."):
                fields = [(path, problem)]
                raise InvalidArgument(f"{path}: {problem}", reason="INVALID_FIELD", fields=fields)
            raise invalid_field(field, entry, problem)
        facts = answer.get("facts")
        self._good[sha256, entry, asked] = facts if isinstance(facts, dict) else {}
        while len(self._good) > MAX_REMEMBERED:
            self._good.pop(next(iter(self._good)), None)
        return self._good[sha256, entry, asked]

    def _answer(self, sha256: str, entry: str, model: dict[str, Any] | None) -> dict[str, Any]:
        module, _, function = entry.partition(":")
        # What the module leaves there may be made unreadable; a service must not fail for it.
        with tempfile.TemporaryDirectory(prefix="millrace-entry-", ignore_cleanup_errors=True) as made:
            folder, work = Path(made, "code"), Path(made, "work")
            folder.mkdir()
            work.mkdir()
            with tempfile.TemporaryFile() as packed:
                packed.write(read_bundle(self._store, sha256))
                packed.seek(0)
                unpack(packed, folder)
            question = {
                "folder": str(folder),
                "work": str(work),
                "module": module,
                "function": function,
                "script": entry if entry.endswith(SCRIPT_SUFFIX) else "",
                **({} if model is None else {"model": model}),
            }
            return ask_in_child(question, work, self._limits, namespaces=self._namespaces)
