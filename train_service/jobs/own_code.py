"""Checks of users' own code, and uploads of bundles.

The checks tell whether a program or a model can run, by its bundle, its requirements, its dataset version and its
entry.

A guarded child process, `entry_child.py`, tries whether an entry can be called; the service's own process never does.
The child imports the module, which runs the user's code at its top level. A script is compiled and not run, because its
top level trains. `Limits` bounds the child. docs/decisions/0024-own-code.md lists what this protects against and what
not.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shared.checkpoint import resolve
from shared.code_bundle_registry import SHA256, BundleRecord, CodeBundles, Readable, load_bundle, read_bundle
from shared.code_environment import CodeEnvironments, add_packages
from shared.code_packing import MAX_BUNDLE_BYTES, unpack
from shared.errors import InvalidArgument, ResourceExhausted, Unavailable, invalid_field
from shared.settings import OwnCode
from shared.storage import ObjectStore
from shared.transforms.records import RowShape, lengths_of, row_shape_to_config
from train_service.checkpoints.fine_tuning import FIELD as INITIAL_FIELD
from train_service.checkpoints.fine_tuning import check_name, weight_shapes
from train_service.domain import spec_rules
from train_service.domain.spec import OWN, SCRIPT_SUFFIX, OwnModelFacts, TrainingSpec, settled
from train_service.jobs.model_check import check_loss, check_names, check_parallel, check_stopping
from train_service.loading.preprocessing import check_classes, check_fits, fitted, fitted_program, steps_of_run

# --- Programs ---

logger = logging.getLogger(__name__)

BUNDLE_FIELD = "spec.program.code_bundle"
ENTRY_FIELD = "spec.program.entry"
# The most modules that an error names.
MAX_NAMED = 20


class ProgramCheck:
    """A check of users' programs.

    `own_code` says whether callers' code may run at all, `environments` how packages are had that this image lacks.
    """

    def __init__(
        self,
        store: ObjectStore,
        own_code: OwnCode | None = None,
        entries: EntryCheck | None = None,
        environments: CodeEnvironments | None = None,
    ) -> None:
        self._store = store
        self.own_code = own_code or OwnCode()
        self.environments = environments or CodeEnvironments()
        self.entries = entries or EntryCheck(store, environments=self.environments)

    def checked(self, spec: TrainingSpec) -> TrainingSpec:
        """Return `spec` with its version's defaults. Raises the errors that `CreateTrainingJob` lists for a program."""
        program = spec.program
        assert program is not None
        self.own_code.require_own_code()
        spec_rules.check(spec)
        bundle = load_bundle(self._store, BUNDLE_FIELD, program.code_bundle)
        if not program.is_script:
            check_module(bundle, ENTRY_FIELD, program.entry)
        # Check the request's own fields first, then the bundle's requirements, and start a process only after both.
        spec = fitted_program(self._store, spec)
        self.environments.check(bundle.requirements, BUNDLE_FIELD)
        self.entries.check(bundle, program.entry)
        return spec


def check_module(bundle: BundleRecord, field: str, entry: str) -> None:
    """Raise `InvalidArgument` for a missing module.

    The error is on `field`; the bundle does not have the module. This check precedes the start of a process.
    """
    top = entry.partition(":")[0].partition(".")[0]
    if top not in bundle.modules:
        has = ", ".join(bundle.modules[:MAX_NAMED]) or "no module"
        raise invalid_field(field, entry, f"{bundle.name} has no module {top!r} at its top; it has {has}")


# --- Models ---

MODEL_BUNDLE_FIELD, MODEL_ENTRY_FIELD = "spec.model.code_bundle", "spec.model.entry"


class OwnModelCheck:
    def __init__(self, store: ObjectStore, programs: ProgramCheck) -> None:
        """Create the check. `programs` says whether callers' code may run at all, and checks entries."""
        self._store = store
        self._programs = programs

    @property
    def environments(self) -> CodeEnvironments:
        """Where the packages come from that a bundle requires and this image lacks."""
        return self._programs.environments

    def import_place(self, wait_s: float | None = None) -> AbstractContextManager[None]:
        """Provide the place of the child that reads weights for such a model, as `EntryCheck.import_place` does."""
        return self._programs.entries.import_place(wait_s)

    def checked(self, spec: TrainingSpec) -> TrainingSpec:
        """Return `spec` completed by version and model.

        It has everything that follows from the version and from the model's code.

        Raises the errors that `CreateTrainingJob` lists for a specification, except for the scaling of its initial
        checkpoint.
        """
        self._programs.own_code.require_own_code()
        spec, version, prepared = fitted(self._store, spec)
        bundle = self._bundle(spec)
        row_shape = prepared.shape
        initial = self._initial_shapes(spec)
        facts = self._facts(bundle, spec, row_shape, steps_of_run(spec, version), initial)
        spec = settled(spec, facts, lengths_of(row_shape))
        spec_rules.check(spec)
        check_fits(spec, version)
        check_classes(self._store, spec, version)
        check_parallel(spec)
        if facts.is_step:
            check_stopping(spec)  # its log's names are known only when it runs
        else:
            check_names(spec, facts.metrics)
            self._check_installed(spec)
        return spec

    def settled_for_weights(self, spec: TrainingSpec, row_shape: RowShape) -> TrainingSpec:
        """Return `spec`, of weights that are brought in, completed by its model, which gets rows of `row_shape`.

        Raises the errors that `ImportCheckpoint` lists for a model of the caller's own code.
        """
        self._programs.own_code.require_own_code()
        facts = self._facts(self._bundle(spec), spec, row_shape, total_steps=1)
        return settled(spec, facts, lengths_of(row_shape))

    def _bundle(self, spec: TrainingSpec) -> BundleRecord:
        bundle = load_bundle(self._store, MODEL_BUNDLE_FIELD, spec.model.code_bundle)
        check_module(bundle, MODEL_ENTRY_FIELD, spec.model.entry)
        self._programs.environments.check(bundle.requirements, MODEL_BUNDLE_FIELD)
        return bundle

    def _facts(
        self,
        bundle: BundleRecord,
        spec: TrainingSpec,
        row_shape: RowShape,
        total_steps: int,
        initial: dict[str, list[int]] | None = None,
    ) -> OwnModelFacts:
        asked = {
            # Plain values, which JSON returns unchanged. The seed determines the order of rows and says nothing about
            # the model, so it is always 0 here.
            "spec": replace(spec, seed=0).as_config(),
            "row_shape": row_shape_to_config(row_shape),
            "total_steps": total_steps,
            "initial": initial,
        }
        found = self._programs.entries.inspect_model(bundle, spec.model.entry, asked)
        try:
            return OwnModelFacts.from_config(found)
        except (TypeError, ValueError, KeyError):
            remedy = "its code has answered its check itself; leave that to the check"
            raise invalid_field(MODEL_ENTRY_FIELD, spec.model.entry, remedy) from None

    def _check_installed(self, spec: TrainingSpec) -> None:
        """Check the named loss and training step. The model's own are not checked here."""
        from train_service.learning.learner import build_training_step

        build_training_step(spec.training_step)
        if spec.loss.name != OWN:
            check_loss(spec)

    def _initial_shapes(self, spec: TrainingSpec) -> dict[str, list[int]] | None:
        if not spec.initial_checkpoint:
            return None
        check_name(spec.initial_checkpoint)
        entry = resolve(self._store, INITIAL_FIELD, spec.initial_checkpoint)
        return {name: list(shape) for name, shape in weight_shapes(self._store, entry).items()}


# --- Entries ---

# Each child may take as much as `Limits` allows. All but one may read weights for a model of a bundle, which takes long
# for large files.
MAX_CHILDREN = 2
MAX_IMPORTING = MAX_CHILDREN - 1
CHECK_WAIT_S = 60.0
MAX_REMEMBERED = 1_000


class EntryCheck:
    """The entry check of one service.

    `namespaces` means that the child gets namespaces of its own if the kernel grants them. The child has the packages
    of `environments` that the bundle requires.
    """

    def __init__(
        self,
        store: Readable,
        limits: Limits | None = None,
        *,
        namespaces: bool = True,
        environments: CodeEnvironments | None = None,
    ) -> None:
        self._store = store
        self._limits = limits or Limits()
        self._namespaces = namespaces
        self._environments = environments or CodeEnvironments()
        self._children = threading.BoundedSemaphore(MAX_CHILDREN)
        self._importing = threading.BoundedSemaphore(MAX_IMPORTING)
        # A build may take minutes, in which the other programs are checked.
        self._builds = threading.BoundedSemaphore(1)
        # The found facts, by bundle, entry and question. Installed packages do not change while the service runs, and a
        # bundle never changes, so a sweep asks only once.
        self._good: dict[tuple[str, str, str], dict[str, Any]] = {}

    def check(self, bundle: BundleRecord, entry: str) -> None:
        """Raise `InvalidArgument` for an entry that cannot be called.

        The error is on `spec.program.entry`, and names the user's file and line if there is one. Raises
        `ResourceExhausted` if other checks take too long, `Unavailable` if the machine is too busy for this one, and
        `FailedPrecondition` if the environment of the bundle cannot be built.
        """
        self._checked(bundle, entry, None, ENTRY_FIELD)

    def inspect_model(self, bundle: BundleRecord, entry: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the facts of an entry's model.

        `own_model_child` finds them; `asked` is its question.

        Raises `InvalidArgument` on the field of `spec` that does not work, and the other errors as `check` does.
        """
        return self._checked(bundle, entry, asked, MODEL_ENTRY_FIELD)

    def _checked(self, bundle: BundleRecord, entry: str, model: dict[str, Any] | None, field: str) -> dict[str, Any]:
        sha256, asked = bundle.sha256, "" if model is None else json.dumps(model, sort_keys=True)
        if (good := self._good.get((sha256, entry, asked))) is not None:
            return good
        checked = f"{MAX_CHILDREN} other programs are being checked"
        with self._environment(bundle.requirements) as packages, _one_of(self._children, checked):
            answer = self._answer(sha256, entry, model, packages)
        if problem := str(answer["problem"]):
            # A child may answer anything, so accept only a field of the specification from its answer.
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

    @contextmanager
    def import_place(self, wait_s: float | None = None) -> Iterator[None]:
        """Hold a place for a child that imports a bundle's module and reads weights.

        Raises `ResourceExhausted` if none is free for `wait_s`, by default `CHECK_WAIT_S`.
        """
        importing = f"{MAX_IMPORTING} other import for a model of a code bundle is being read"
        with (
            _one_of(self._importing, importing, wait_s),
            _one_of(self._children, f"{MAX_CHILDREN} other programs are being checked", wait_s),
        ):
            yield

    @contextmanager
    def _environment(self, requirements: Sequence[str]) -> Iterator[Path | None]:
        """Provide the environment. It is built before the check takes the place of another program's."""
        if self._environments.is_ready(requirements):
            lease = self._environments.lease(requirements)
        else:
            with _one_of(self._builds, "another environment is being built"):
                lease = self._environments.lease(requirements)
        try:
            yield lease.packages if lease else None
        finally:
            if lease:
                lease.close()

    def _answer(self, sha256: str, entry: str, model: dict[str, Any] | None, packages: Path | None) -> dict[str, Any]:
        module, _, function = entry.partition(":")
        # The module may leave unreadable files there; the service must not fail because of them.
        with tempfile.TemporaryDirectory(prefix="millrace-entry-", ignore_cleanup_errors=True) as made:
            folder, work = Path(made, "code"), Path(made, "work")
            work.mkdir()
            unpack_bundle(self._store, sha256, folder)
            question = {
                "folder": str(folder),
                "work": str(work),
                "module": module,
                "function": function,
                "script": entry if entry.endswith(SCRIPT_SUFFIX) else "",
                "packages": str(packages or ""),
                **({} if model is None else {"model": model}),
            }
            return ask_in_child(question, work, self._limits, namespaces=self._namespaces)


@contextmanager
def _one_of(places: threading.BoundedSemaphore, taken: str, wait_s: float | None = None) -> Iterator[None]:
    """Hold one of the places. Raises `ResourceExhausted` if none is free for `wait_s`, by default `CHECK_WAIT_S`."""
    if not places.acquire(timeout=CHECK_WAIT_S if wait_s is None else wait_s):
        raise ResourceExhausted(f"{taken}; try again later", reason="TOO_MANY_PROGRAMS")
    try:
        yield
    finally:
        places.release()


def unpack_bundle(store: Readable, sha256: str, folder: Path) -> None:
    """Unpack a stored bundle into the new `folder`."""
    folder.mkdir()
    with tempfile.TemporaryFile() as packed:
        packed.write(read_bundle(store, sha256))
        packed.seek(0)
        unpack(packed, folder)


# --- Guarded child ---

CHILD = Path(__file__).with_name("entry_child.py")
# Time to start Python and to end all processes, in addition to the time limit of the task.
GUARD_S = 30.0
RETRY_AFTER_S = 30.0
MAX_ANSWER_BYTES = 64 * 1024
# Variables of the service's environment that the child gets: no credentials, no token, no proxy.
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one check.

    They hold for all its processes together, except `file_bytes` and `open_files`, which hold for each process.

    `idle_s` is time in which the processes neither compute nor wait for a CPU or the disk. `wall_s` is all time. It is
    passed only on a busy machine, so passing it is not the caller's fault.
    """

    memory_bytes: int = 4 * 1024**3
    cpu_s: float = 60.0
    idle_s: float = 90.0
    wall_s: float = 200.0
    processes: int = 16
    open_files: int = 256
    file_bytes: int = 16 * 1024**2


def ask_in_child(question: Mapping[str, Any], work: Path, limits: Limits, *, namespaces: bool = True) -> dict[str, Any]:
    """Return the guarded child's answer to `question`.

    Its `problem` is empty if nothing is wrong.

    Raises `Unavailable` if the machine is too busy for the check to end within `limits.wall_s`.

    `work` is the child's folder. `namespaces` means that the child gets namespaces of its own if the kernel grants
    them. See `entry_child` for the question.
    """
    path = [one for one in sys.path if one]
    if packages := question.get("packages"):
        add_packages(Path(packages), path)
    whole = {
        **question,
        "work": str(work),
        "path": path,
        "limits": asdict(limits),
        "namespaces": namespaces,
    }
    subject = "the files" if "weights" in question else "its module"
    command = [sys.executable, "-I", "-B", str(CHILD)]
    # Use files instead of pipes: a process that is left behind would keep a pipe open.
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as answered:
        asked.write(json.dumps(whole).encode())
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
            status = child.wait(limits.wall_s + GUARD_S)
        except subprocess.TimeoutExpired:
            raise _too_busy(limits) from None
        finally:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        answered.seek(0)
        answer = answered.read(MAX_ANSWER_BYTES)
    try:
        record = json.loads(answer)
        problem, busy = str(record["problem"]), bool(record.get("busy"))
    except (ValueError, TypeError, KeyError):
        # The guard runs none of the user's code. Without namespaces, that code may still kill the guard.
        logger.warning("a guarded child ended without an answer, with status %d", status)
        return {"problem": f"{subject} ended the process that checks {'it' if subject == 'its module' else 'them'}"}
    if busy:
        raise _too_busy(limits)
    return {**record, "problem": problem}


def _too_busy(limits: Limits) -> Unavailable:
    text = f"the check did not end within {limits.wall_s:g} s, because this machine is busy; try again later"
    return Unavailable(text, reason="CHECK_NOT_FINISHED", retry_after_s=RETRY_AFTER_S)


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


# --- Uploads of bundles ---

MAX_CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Header:
    """The first message, which describes all chunks together."""

    sha256: str
    size_bytes: int


class BundleIntake:
    """Uploads of code bundles. They are refused if `own_code` does not let callers' code run."""

    def __init__(self, bundles: CodeBundles, own_code: OwnCode | None = None) -> None:
        self.bundles = bundles
        self._own_code = own_code or OwnCode()

    async def receive(self, parts: AsyncIterator[Header | bytes]) -> BundleRecord:
        """Receive and store a bundle.

        One chunk is in memory at a time.

        Raises the errors that `CreateCodeBundle` lists. After any error, and if the caller disconnects, no bundle is
        created and the spooled file is removed.
        """
        self._own_code.require_own_code()
        header = await anext(parts, None)
        if not isinstance(header, Header):
            raise invalid_field("header", None, "send it first, then the chunks")
        _check(header)
        # A folder, so that the store can upload the file by its path.
        with tempfile.TemporaryDirectory(prefix="millrace-bundle-") as folder:
            spooled = Path(folder, "bundle.tar")
            await _spool(header, parts, spooled)
            return await asyncio.to_thread(self.bundles.create, spooled, header.sha256)


async def _spool(header: Header, parts: AsyncIterator[Header | bytes], spooled: Path) -> None:
    received = 0
    with spooled.open("wb") as file:
        async for part in parts:
            if isinstance(part, Header):
                raise invalid_field("header", part.sha256, "send it once, before the chunks")
            received += len(part)
            if len(part) > MAX_CHUNK_BYTES:
                raise invalid_field("chunk", f"{len(part)} bytes", f"send at most {MAX_CHUNK_BYTES} bytes in a message")
            if received > header.size_bytes:
                break
            await asyncio.to_thread(file.write, part)
    if received != header.size_bytes:
        more = "more" if received > header.size_bytes else f"only {received}"
        raise invalid_field("header.size_bytes", header.size_bytes, f"{more} bytes came; send as many as it says")


def _check(header: Header) -> None:
    if not SHA256.fullmatch(header.sha256):
        raise invalid_field("header.sha256", header.sha256, "use 64 digits of lower-case hex")
    if header.size_bytes < 1:
        raise invalid_field("header.size_bytes", header.size_bytes, "use 1 or more")
    if header.size_bytes > MAX_BUNDLE_BYTES:
        raise ResourceExhausted(
            f"header.size_bytes: a bundle has at most {MAX_BUNDLE_BYTES:,} bytes, not {header.size_bytes:,}; data "
            "belongs in a dataset version, or is named in .millraceignore",
            reason="BUNDLE_TOO_LARGE",
            metadata={"max_size_bytes": str(MAX_BUNDLE_BYTES)},
        )
