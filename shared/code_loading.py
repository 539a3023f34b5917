"""Loads a bundle's code into this process: unpacks it, makes it importable, and finds its entry.

Only processes that may run users' code use it: workers and replicas. A service never calls `load_code`, and without
that call no code of a bundle can be found.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.code_bundle_registry import Readable, digest_of, unpack_on_node
from shared.code_environment import use_environment
from shared.code_requirements import requirements_of_folder
from shared.errors import FailedPrecondition, MillraceError, first_line

# The folder of each loaded bundle, by name (`codeBundles/{sha256}`). A process loads at most one bundle, because
# modules of two could have the same names.
_loaded: dict[str, Path] = {}
_lock = threading.Lock()


def node_folder() -> Path:
    """Return the folder for unpacked bundles on this node, shared by all processes of this user."""
    return Path(f"/tmp/millrace-{os.getuid()}/code")


def load_code(
    store: Readable, code_bundle: str, root: Path | None = None, tick: Callable[[], None] = lambda: None
) -> Path:
    """Make the modules of `codeBundles/{sha256}` importable in this process, and the packages that they require.

    Returns the folder that holds them, below `root` (default: `node_folder()`). `tick` is called while packages are
    installed. Raises `FailedPrecondition` if this process has loaded another bundle, and what `unpack_on_node` and
    `use_environment` raise.
    """
    sha256 = digest_of("code_bundle", code_bundle)
    with _lock:
        others = [name for name in _loaded if name != code_bundle]
        if others:
            raise FailedPrecondition(
                f"this process has loaded {others[0]} and cannot load {code_bundle} besides: their modules could have "
                "the same names; use another process",
                reason="CODE_MISMATCH",
                metadata={"resource": code_bundle, "loaded": others[0]},
            )
        root = root or node_folder()
        root.parent.mkdir(mode=0o700, exist_ok=True)
        folder = unpack_on_node(store, sha256, root)
        use_environment(requirements_of_folder(folder), os.environ, tick)
        # Compiled files would change the folder, whose content is compared with the digest.
        sys.dont_write_bytecode = True
        if str(folder) not in sys.path:
            # At the end of the path, so that no module of the bundle replaces an installed one.
            sys.path.append(str(folder))
        _loaded[code_bundle] = folder
        return folder


def adopt_code(code_bundle: str, folder: Path) -> None:
    """Register a bundle that is already unpacked in `folder` and on `sys.path`.

    Used by the child process that checks code before a job is created.
    """
    with _lock:
        _loaded[code_bundle] = folder


def find_entry(code_bundle: str, entry: str) -> Any:
    """Import and return the object that `module:name` means in a loaded bundle.

    Raises `FailedPrecondition`: CODE_NOT_LOADED in a process that does not run users' code, MODULE_SHADOWED if an
    installed module has the name, and ENTRY_FAILED, with the line of the bundle, for a module that cannot be imported
    or has no such object.
    """
    folder = _loaded.get(code_bundle)
    if folder is None:
        raise FailedPrecondition(
            f"{entry} is code of {code_bundle}, which this process has not loaded; only workers and replicas run "
            "such code",
            reason="CODE_NOT_LOADED",
            metadata={"resource": code_bundle},
        )
    module_name, _, name = entry.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module's import can raise anything
        raise entry_failed(code_bundle, entry, error) from error
    if not str(getattr(module, "__file__", None) or "").startswith(f"{folder}{os.sep}"):
        raise FailedPrecondition(
            f"{module_name} is {getattr(module, '__file__', 'built in')}, and not of {code_bundle}: a module of that "
            "name is installed; rename the bundle's",
            reason="MODULE_SHADOWED",
            metadata={"resource": code_bundle},
        )
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise entry_failed(code_bundle, entry, error) from error
    return found


def entry_failed(code_bundle: str, entry: str, error: BaseException) -> MillraceError:
    """Make the error for an exception in a bundle's code.

    It names the exception and the innermost line of the bundle.
    """
    where = line_in_code(error)
    at = f" at {where}" if where else ""
    return FailedPrecondition(
        f"{entry} of {code_bundle} failed{at}: {type(error).__name__}: {first_line(error)}",
        reason="ENTRY_FAILED",
        metadata={"resource": code_bundle, "entry": entry, "line": where},
    )


def line_in_code(error: BaseException) -> str:
    """Return the innermost line of a loaded bundle in the traceback, e.g. `train.py:12`.

    Empty if there is none.
    """
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        for folder in _loaded.values():
            if frame.filename.startswith(f"{folder}{os.sep}"):
                where = f"{frame.filename.removeprefix(f'{folder}{os.sep}')}:{frame.lineno}"
    return where
