"""Environments of code bundles: packages that a bundle requires and this node's image lacks.

    environments = code_environments(os.environ)                        # of a service or of a node
    with environments.opened(requirements, "the check") as packages:    # a folder for `sys.path`, or None
        ...
    use_environment(requirements, os.environ, tick)                     # for the whole life of this process

The image comes first. Only requirements that it does not meet are installed, from wheels, by their hashes. Packages
that Millrace itself imports stay those of the image, because one process has one version of a package.

uv installs into a folder of this node that is named by the digest of what is in it. All processes of the user share the
folder. A process that uses it holds a shared lock on it, and one that builds or removes it an exclusive one:

    {folder}/{digest}/              the packages
    {folder}/{digest}.json          their record, which is written last
    {folder}/{digest}.lock          its modification time is that of the last use
    {folder}/{digest}.requirements  what uv reads
    {folder}/{digest}.work/         uv's temporary files while it builds

The record has a fingerprint of the files' names, sizes and times. It notices an accident, and no forgery.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.machinery
import json
import logging
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import IO

from shared.code_packing import HASH, PYTHON, unmet
from shared.errors import FailedPrecondition, Unavailable, invalid_fields
from shared.settings import SettingsError

logger = logging.getLogger(__name__)

# --- Settings ---

VARIABLE = "MILLRACE_CODE_ENVIRONMENTS"
OFF, UV = "off", "uv"
FOLDER_VARIABLE = "MILLRACE_CODE_ENVIRONMENTS_FOLDER"
SIZE_VARIABLE = "MILLRACE_CODE_ENVIRONMENTS_GIB"
# /tmp is open to other users, so each folder on the way must be this user's alone.
DEFAULT_FOLDER = "/tmp/millrace-{uid}/environments"
DEFAULT_GIB = 20.0
BUILD_TIMEOUT_S = 600.0
# A torch environment has about 30,000.
MAX_FILES = 300_000
GIB = 2**30


def code_environments(environ: Mapping[str, str]) -> CodeEnvironments:
    """Read MILLRACE_CODE_ENVIRONMENTS and its folder and size. Raises `SettingsError`."""
    mode = environ.get(VARIABLE) or OFF
    if mode not in (OFF, UV):
        raise SettingsError(f"{VARIABLE}={mode!r}: use {OFF} or {UV}")
    folder = Path(environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER.format(uid=os.getuid()))
    if not folder.is_absolute():
        raise SettingsError(f"{FOLDER_VARIABLE}={str(folder)!r}: use an absolute path")
    text = environ.get(SIZE_VARIABLE) or str(DEFAULT_GIB)
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise SettingsError(f"{SIZE_VARIABLE}={text!r}: use a number above 0")
    uv = ""
    if mode == UV:
        beside = Path(sys.executable).with_name("uv")
        uv = str(beside) if os.access(beside, os.X_OK) else shutil.which("uv") or ""
        if not uv:
            raise SettingsError(f"{VARIABLE}={UV}: there is no program uv; install it in the image, or use {OFF}")
    by_default = not environ.get(FOLDER_VARIABLE)
    return CodeEnvironments(uv=uv, folder=folder, by_default=by_default, max_bytes=int(gib * GIB))


def environments_of_node(environ: Mapping[str, str]) -> CodeEnvironments:
    """Do as `code_environments` within a job. Raises `FailedPrecondition` for malformed settings of this node."""
    try:
        return code_environments(environ)
    except SettingsError as error:
        raise FailedPrecondition(f"a setting of this node: {error}", reason="REQUIREMENTS_UNMET") from error


# --- What must be installed ---

REMEDY = "install it in the image of the services and of Ray's nodes, or change the bundle's requirements"
MAX_NAMED = 20
MISSING = "is not installed"
PINNED = re.compile(r"==[^*,]+")
HASH_OF = re.compile(r"\s--hash[= ](sha(?:256|384|512):[0-9a-f]+)(?=\s|$)")
# The packages in this repository, which an editable installation does not list file by file.
OWN_PACKAGES = (
    "data_service",
    "train_service",
    "inference_service",
    "shared",
    "millrace",
    "inference",
    "millrace_client",
)


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or of Python under the name `python`. None if there is none."""
    if name == PYTHON:
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def packages_of_platform() -> frozenset[str]:
    """Return the normalized names of the distributions that Millrace needs, and of all that those need.

    Where Millrace is not installed as a distribution, these are all that are installed.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    # The extras that are asked of each distribution, as far as its own requirements were followed.
    followed: dict[str, set[str]] = {}
    ahead: list[tuple[str, set[str]]] = [("millrace", {"server"})]
    while ahead:
        name, extras = ahead.pop()
        normalized = canonicalize_name(name)
        if normalized in followed and extras <= followed[normalized]:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        wanted = followed.setdefault(normalized, set())
        wanted |= extras
        ahead += [
            (one.name, set(one.extras))
            for one in map(Requirement, requires)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *wanted))
        ]
    if "millrace" not in followed:
        return frozenset(canonicalize_name(distribution.name) for distribution in metadata.distributions())
    return frozenset(followed)


def to_install(
    requirements: Iterable[str],
    installed: Callable[[str], str | None] = installed_version,
    of_platform: Callable[[], frozenset[str]] = packages_of_platform,
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the requirements that uv must install, and those that cannot be met, each with the problem.

    Each line for uv has one exact version and its hashes.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    # Pinned lines by name, with the version. A wheel's own requirements, which name no version, may be met by them.
    pinned: dict[str, tuple[str, str]] = {}
    problems, unpinned = [], []
    for text in requirements:
        for bare, problem in unmet([text], installed):
            if not problem.endswith("installed"):
                problems.append((bare, f"{problem}; {REMEDY}"))
                continue
            requirement, hashes = Requirement(bare), HASH_OF.findall(f" {text}")
            name = canonicalize_name(requirement.name)
            if name == PYTHON or name in of_platform():
                remedy = "Millrace itself runs with it: require that version, or use an image with the other"
                problems.append((bare, f"{problem}; {remedy}"))
            elif not PINNED.fullmatch(str(requirement.specifier)):
                unpinned.append((requirement, bare, problem))
            elif not hashes or len(hashes) != len(HASH.findall(f" {text}")):
                remedy = "name its hashes, --hash=sha256:…, as `uv pip compile --generate-hashes` does"
                problems.append((bare, f"{problem}; {remedy}; or {REMEDY}"))
            else:
                line = " ".join((f"{name}{requirement.specifier}", *(f"--hash={one}" for one in hashes)))
                pinned[name] = (line, str(requirement.specifier).removeprefix("=="))
    for requirement, bare, problem in unpinned:
        name = canonicalize_name(requirement.name)
        _, version = pinned.get(name, ("", ""))
        if not version or not requirement.specifier.contains(version, prereleases=True):
            problems.append((bare, f"{problem}; name one version, {name}==…, with its hashes; or {REMEDY}"))
    return sorted(line for line, _ in pinned.values()), problems


# --- Environments of a node ---

NAME = re.compile(r"[0-9a-f]{64}(-\d+)?")
# Times to look at a build: often at first, and later at most for a tenth of the time.
BUILD_POLL_S = 0.1
LOCK_POLL_S = 0.05
# Without a record, other processes share the lock only for the moment of a poll. If this number of polls finds it
# shared, a process uses the environment, and the record was removed meanwhile.
POLLS_BEFORE_IN_USE = 20
MAX_MESSAGE = 2_000
# Of files that Python imports, the longest first: `.cpython-311-x86_64-linux-gnu.so` before `.so`.
SUFFIXES = tuple(sorted(importlib.machinery.all_suffixes(), key=len, reverse=True))
# What uv gets of the environment, besides its own variables: no key of the store, no token.
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "NETRC", "SSL_CERT_FILE", "SSL_CERT_DIR")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@dataclass(frozen=True, kw_only=True)
class CodeEnvironments:
    """The environments of this node. Without `uv`, the path of the program, none are made."""

    uv: str = ""
    folder: Path = Path("/nonexistent")
    # Whether `folder` is the default one, which must be safe from other users. The operator answers for another.
    by_default: bool = False
    # All environments together. The oldest unused ones are removed for a new one, and no new one may be larger.
    max_bytes: int = int(DEFAULT_GIB * GIB)
    max_files: int = MAX_FILES
    timeout_s: float = BUILD_TIMEOUT_S

    def check(
        self,
        requirements: Iterable[str],
        field: str,
        installed: Callable[[str], str | None] = installed_version,
    ) -> None:
        """Raise `InvalidArgument` on `field` for requirements that neither the image nor an environment can meet."""
        if self.uv:
            _, problems = to_install(requirements, installed)
        else:
            problems = [(text, f"{what}; {REMEDY}") for text, what in unmet(requirements, installed)]
        if problems:
            raise invalid_fields((field, text, what) for text, what in problems[:MAX_NAMED])

    @contextmanager
    def opened(
        self, requirements: Iterable[str], note_progress: Callable[[], None] = lambda: None
    ) -> Iterator[Path | None]:
        """Provide the folder with the packages that the image lacks, and build it if necessary.

        None if the image lacks nothing. The folder stays while the body runs. `note_progress` is called while it waits.

        Raises `FailedPrecondition` for requirements that cannot be met here and for a build that failed, with uv's
        message, and `Unavailable` if another process builds for too long.
        """
        lease = self.lease(requirements, note_progress)
        try:
            yield lease.packages if lease else None
        finally:
            if lease:
                lease.close()

    def is_ready(self, requirements: Iterable[str]) -> bool:
        """Return whether `lease` has nothing to build, as far as the records of this node say."""
        lines = to_install(requirements)[0] if self.uv else []
        return not lines or os.access(self.folder / f"{digest_of_environment(lines)}.json", os.R_OK)

    def lease(self, requirements: Iterable[str], note_progress: Callable[[], None] = lambda: None) -> Lease | None:
        """Do as `opened`, until the lease is closed or the process ends."""
        if self.uv:
            lines, problems = to_install(requirements)
        else:
            remedy = f"{REMEDY}; or set {VARIABLE}={UV} on this node"
            lines, problems = [], [(text, f"{what}; {remedy}") for text, what in unmet(requirements, installed_version)]
        _refuse_missing(problems)
        return self._leased(lines, note_progress) if lines else None

    def _leased(self, lines: list[str], note_progress: Callable[[], None]) -> Lease:
        for folder in (self.folder.parent, self.folder):
            if self.by_default:
                _make_private(folder)
            else:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.folder.stat().st_uid != os.getuid():
            raise FailedPrecondition(f"{FOLDER_VARIABLE}: {self.folder} is another user's: name a folder of this one")
        digest = digest_of_environment(lines)
        for number in range(100):
            environment = _Environment(self, f"{digest}-{number}" if number else digest)
            if lease := environment.lease(lines, note_progress):
                self._evict_oldest(environment.name)
                return lease
        raise FailedPrecondition(
            f"the environments in {self.folder} were changed by other processes: remove the folder"
        )

    def _evict_oldest(self, keep: str, keep_bytes: int | None = None) -> None:
        """Remove the environments that were not used for longest, until all fit into `max_bytes`.

        `keep` stays. `keep_bytes` is its size while it is built.
        """
        names = {one.name.partition(".")[0] for one in self.folder.iterdir()}
        environments = [_Environment(self, name) for name in names if NAME.fullmatch(name) and name != keep]
        sizes = {one.name: one.size() for one in environments}
        sizes[keep] = _Environment(self, keep).size() if keep_bytes is None else keep_bytes
        for environment in sorted(environments, key=lambda one: one.used_at()):
            if sum(sizes.values()) <= self.max_bytes:
                return
            if environment.remove_unused():
                sizes[environment.name] = 0


def _make_private(folder: Path) -> None:
    """Make a folder of this user alone. Raises `FailedPrecondition` if another user made it or can change it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise FailedPrecondition(
            f"{folder} is no folder of this user's alone: have it removed, or name another in {FOLDER_VARIABLE}",
            reason="FOLDER_NOT_OWN",
            metadata={"folder": str(folder)},
        )


def digest_of_environment(lines: Iterable[str]) -> str:
    """Return the digest that names an environment, from its packages and the Python that they are for."""
    here = (platform.python_implementation(), sysconfig.get_config_var("SOABI"), platform.machine())
    return hashlib.sha256(json.dumps([here, sorted(lines)]).encode()).hexdigest()


class Lease:
    """A shared lock on an environment. `packages` is the folder for `sys.path`."""

    def __init__(self, lock: IO[str], packages: Path) -> None:
        self._lock = lock
        self.packages = packages

    def close(self) -> None:
        self._lock.close()


class _Environment:
    def __init__(self, of: CodeEnvironments, name: str) -> None:
        self._of = of
        self.name = name
        self._packages = of.folder / name
        self._record = of.folder / f"{name}.json"
        self._lock = of.folder / f"{name}.lock"
        self._requirements = of.folder / f"{name}.requirements"
        self._work = of.folder / f"{name}.work"

    def lease(self, lines: list[str], note_progress: Callable[[], None]) -> Lease | None:
        """Return a lease, or None for an environment that was changed while others use it."""
        lock = self._lock.open("a")
        shared_polls = 0
        try:
            while True:
                self._wait_for(lock, note_progress)
                if self._is_whole():
                    os.utime(self._lock)
                    return Lease(lock, self._packages)
                changed = self._record.exists() or shared_polls == POLLS_BEFORE_IN_USE
                fcntl.flock(lock, fcntl.LOCK_UN)
                if _try_lock(lock, fcntl.LOCK_EX):
                    if not self._is_whole():
                        self._build(lines, lock, note_progress)
                    fcntl.flock(lock, fcntl.LOCK_UN)
                elif changed:
                    lock.close()
                    return None
                else:
                    shared_polls += 1
                    note_progress()
                    time.sleep(LOCK_POLL_S)  # another process polls too, or begins to build
        except BaseException:
            lock.close()
            raise

    def size(self) -> int:
        """Return the bytes of the environment, complete or not."""
        with suppress(OSError, ValueError, KeyError):
            return int(json.loads(self._record.read_text())["bytes"])
        return _disk_use(self._packages, self._work)[0]

    def used_at(self) -> float:
        with suppress(OSError):
            return self._lock.stat().st_mtime
        return 0.0

    def remove_unused(self) -> bool:
        """Remove the environment unless a process uses or builds it. The lock file stays: another may wait for it."""
        with self._lock.open("a") as lock:
            if not _try_lock(lock, fcntl.LOCK_EX):
                return False
            try:
                self._remove()
            except OSError as error:
                logger.warning("the environment %s cannot be removed: %s", self.name, error)
                return False
            return True

    def _remove(self) -> None:
        self._record.unlink(missing_ok=True)
        self._requirements.unlink(missing_ok=True)
        for folder in (self._packages, self._work):
            _remove_folder(folder)

    def _wait_for(self, lock: IO[str], note_progress: Callable[[], None]) -> None:
        until = time.monotonic() + 2 * self._of.timeout_s
        while not _try_lock(lock, fcntl.LOCK_SH):
            note_progress()
            if time.monotonic() > until:
                raise Unavailable(f"another process has built the environment {self._packages} for too long; try again")
            time.sleep(LOCK_POLL_S)

    def _is_whole(self) -> bool:
        try:
            record = json.loads(self._record.read_text())
        except (OSError, ValueError):
            return False
        return isinstance(record, dict) and record.get("fingerprint") == _fingerprint(self._packages)

    def _build(self, lines: list[str], lock: IO[str], note_progress: Callable[[], None]) -> None:
        self._remove()
        self._work.mkdir(mode=0o700)
        self._packages.mkdir(mode=0o700)
        self._requirements.write_text("".join(f"{line}\n" for line in lines))
        logger.info("building the environment %s of %d packages", self.name, len(lines))
        try:
            self._install(lock, note_progress)
            _check_files(self._packages)
            record = {
                "bytes": _disk_use(self._packages)[0],
                "fingerprint": _fingerprint(self._packages),
                "lines": lines,
            }
            fresh = self._work / "record.json"
            fresh.write_text(json.dumps(record))
            fresh.rename(self._record)
        except BaseException:
            self._remove()
            raise
        _remove_folder(self._work)

    def _install(self, lock: IO[str], note_progress: Callable[[], None]) -> None:
        options = [
            "--require-hashes",
            "--no-build",
            "--no-cache",
            "--no-progress",
            "--compile-bytecode",
            "--color=never",
        ]
        where = ["--python", sys.executable, "--no-python-downloads", "--target", str(self._packages)]
        output = self._work / "output.txt"
        with output.open("wb") as file:
            # The child keeps the lock's file open, so it stays locked for as long as uv lives.
            child = subprocess.Popen(
                [self._of.uv, "pip", "sync", "--quiet", *options, *where, str(self._requirements)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                cwd=self._work,
                pass_fds=[lock.fileno()],
                start_new_session=True,
            )
        try:
            over = self._watch(child, note_progress)
        finally:
            if child.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if over or child.returncode:
            said = " ".join(output.read_bytes()[-MAX_MESSAGE:].decode(errors="replace").split())
            raise FailedPrecondition(
                f"the environment of the bundle's requirements cannot be built: {over or said or child.returncode}",
                reason="ENVIRONMENT_FAILED",
                metadata={"environment": self.name},
            )

    def _watch(self, child: subprocess.Popen[bytes], note_progress: Callable[[], None]) -> str:
        """Wait for uv. Return the limit that it exceeded, empty if none."""
        began, pause_s = time.monotonic(), BUILD_POLL_S
        while True:
            with suppress(subprocess.TimeoutExpired):
                child.wait(pause_s)
            note_progress()
            looked = time.monotonic()
            used, files = _disk_use(self._packages, self._work)
            if used <= self._of.max_bytes:
                # At once, and not when it is complete: otherwise all would take up to twice the limit meanwhile.
                self._of._evict_oldest(self.name, used)
            pause_s = max(BUILD_POLL_S, 10 * (time.monotonic() - looked))
            if used > self._of.max_bytes:
                return f"it takes more than {self._of.max_bytes:,} bytes, the limit that {SIZE_VARIABLE} sets"
            if files > self._of.max_files:
                return f"it has more than {self._of.max_files:,} files"
            if child.returncode is not None:
                return ""
            if time.monotonic() - began > self._of.timeout_s:
                return f"it takes more than {self._of.timeout_s:g} s"

    def _environment(self) -> dict[str, str]:
        passed = {name: value for name, value in os.environ.items() if _is_passed_on(name)}
        return {**passed, "TMPDIR": str(self._work)}


def _is_passed_on(name: str) -> bool:
    return name in PASSED_ON or name.startswith("UV_") or name.lower() in PROXIES


def _check_files(packages: Path) -> None:
    """Raise `FailedPrecondition` for a file that Python imports as a module of the platform's.

    The environment comes before the image, so such a file would take the place of the platform's.
    """
    platforms = _modules_of_platform()
    clashing = sorted(path for path in _files(packages) if _module_of(path) in platforms)
    if clashing:
        raise FailedPrecondition(
            f"the bundle's requirements bring {clashing[0]}, which takes the place of the image's own packages; "
            "leave out the package that has it",
            reason="ENVIRONMENT_FAILED",
        )


@cache
def _modules_of_platform() -> frozenset[str]:
    """Return the modules of the platform's packages, `numpy/linalg`, with the top folders that are namespaces."""
    found = set(OWN_PACKAGES)
    for name in packages_of_platform():
        with suppress(metadata.PackageNotFoundError):
            for file in metadata.files(name) or []:
                if ".." not in file.parts and (module := _module_of(file.as_posix())):
                    found |= {module, module.partition("/")[0]}
    return frozenset(found)


def _module_of(path: str) -> str:
    """Return the module that Python would import from a file, as a path without a suffix. Empty if it is none."""
    suffix = next((one for one in SUFFIXES if path.endswith(one)), "")
    if not suffix or "__pycache__" in path:
        return ""
    return path.removesuffix(suffix).removesuffix("/__init__")


def _files(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent, name).relative_to(folder).as_posix()


def _fingerprint(folder: Path) -> str:
    """Return a digest of the files' names, sizes and times. Compiled files may be added."""
    lines = []
    for path in _files(folder):
        if "__pycache__/" not in path:
            try:
                stat = (folder / path).lstat()
            except FileNotFoundError:
                return ""
            lines.append(f"{stat.st_size} {stat.st_mtime_ns} {path}")
    return hashlib.sha256("\n".join(sorted(lines)).encode(errors="surrogateescape")).hexdigest()


def _disk_use(*folders: Path) -> tuple[int, int]:
    """Return the bytes and the number of files below the folders. A file with several names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for folder in folders:
        for parent, below, names in os.walk(folder):
            for name in (*below, *names):
                with suppress(OSError):  # uv has moved it
                    stat = Path(parent, name).lstat()
                    sizes[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(sizes.values()), len(sizes)


def _remove_folder(folder: Path) -> None:
    """Remove a folder, also where a program made folders in it read-only."""
    with suppress(FileNotFoundError):
        folder.chmod(0o700)
        for parent, names, _ in os.walk(folder):
            for inner in (Path(parent, name) for name in names):
                if not inner.is_symlink():
                    inner.chmod(0o700)
        shutil.rmtree(folder)


def _try_lock(lock: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _refuse_missing(problems: list[tuple[str, str]]) -> None:
    """Raise `FailedPrecondition` if this node lacks a distribution. The service that took the job had it.

    Another version of one is no error here: a checkpoint is served on after the image was upgraded.
    """
    missing = [f"{text!r}: {what}" for text, what in problems if MISSING in what]
    if missing:
        text = "; ".join(missing[:MAX_NAMED])
        raise FailedPrecondition(
            f"the bundle's requirements are not met on this node: {text}", reason="REQUIREMENTS_UNMET"
        )
    for text, what in problems[:MAX_NAMED]:
        logger.warning("the bundle requires %r: %s", text, what)


# --- The environment of this process ---

# Held until the process ends.
_leases: list[Lease] = []


def use_environment(
    requirements: Iterable[str], environ: Mapping[str, str], note_progress: Callable[[], None] = lambda: None
) -> Path | None:
    """Make the packages that a bundle requires importable in this process, which keeps them for its life.

    Return their folder, None if the image has them all. Raises what `environments_of_node` and
    `CodeEnvironments.opened` raise.
    """
    lease = environments_of_node(environ).lease(requirements, note_progress)
    if lease is None:
        return None
    _leases.append(lease)
    add_packages(lease.packages, sys.path)
    importlib.invalidate_caches()
    return lease.packages


def add_packages(packages: Path, path: list[str]) -> None:
    """Put an environment into `path`, before the image's packages and after Python's own modules."""
    if str(packages) in path:
        return
    image = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    place = next((number for number, one in enumerate(path) if one in image), len(path))
    path.insert(place, str(packages))
