"""Whether a bundle's entry can be called at all: tried in a child process, never in the service's own.

The child imports the module, which runs whatever the user wrote at its top level. `Limits` says what it may take;
docs/decisions/0024-own-code.md says what this keeps from it and what not.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared.code_bundle import Readable, read_bundle
from shared.code_packing import unpack
from shared.errors import InvalidArgument, ResourceExhausted, invalid_field

logger = logging.getLogger(__name__)

FIELD, MODEL_FIELD = "spec.program.entry", "spec.model.entry"
CHILD = Path(__file__).with_name("entry_child.py")
# Each may take as much as `Limits` allows.
MAX_CHILDREN = 2
CHECK_WAIT_S = 60.0
# To start Python, and to end all processes, besides the time that the module may take.
GUARD_S = 30.0
MAX_ANSWER_BYTES = 64 * 1024
MAX_REMEMBERED = 1_000
# Of the service's environment nothing else gets to the child: no credentials, no token, no proxy.
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of all processes of one check together, but for `file_bytes` and `open_files`, which hold for each."""

    memory_bytes: int = 4 * 1024**3
    cpu_s: float = 60.0
    wall_s: float = 90.0
    processes: int = 16
    open_files: int = 256
    file_bytes: int = 16 * 1024**2


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

    def look_at_model(self, sha256: str, entry: str, asked: dict[str, Any]) -> dict[str, Any]:
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
                "path": [one for one in sys.path if one],
                "limits": asdict(self._limits),
                "namespaces": self._namespaces,
                **({} if model is None else {"model": model}),
            }
            return self._ask(json.dumps(question).encode(), work)

    def _ask(self, question: bytes, work: Path) -> dict[str, Any]:
        command = [sys.executable, "-I", "-B", str(CHILD)]
        # Files, not pipes: a process that is left behind would keep a pipe open.
        with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as answered:
            asked.write(question)
            asked.seek(0)
            child = subprocess.Popen(
                command,
                stdin=asked,
                stdout=answered,
                stderr=subprocess.DEVNULL,
                env=_environment(work),
                cwd=work,
                start_new_session=True,
            )
            try:
                status = child.wait(self._limits.wall_s + GUARD_S)
            except subprocess.TimeoutExpired:
                return {"problem": f"its module was not imported within {self._limits.wall_s:g} s"}
            finally:
                if child.returncode is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
            answered.seek(0)
            answer = answered.read(MAX_ANSWER_BYTES)
        try:
            told = json.loads(answer)
            return {**told, "problem": str(told["problem"])}
        except (ValueError, TypeError, KeyError):
            # The guard runs none of the user's code. Where it has no namespaces, that may still kill it.
            logger.warning("a check of an entry ended without an answer, with status %d", status)
            return {"problem": "its module ended the process that checks it"}


def _environment(work: Path) -> dict[str, str]:
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    here = str(work)
    return {
        **passed,
        "HOME": here,
        "TMPDIR": here,
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MPLBACKEND": "Agg",
        "HF_HUB_OFFLINE": "1",
    }
