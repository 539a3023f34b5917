"""Where the replicas on one machine listen: a folder for each application, below one of this user's own."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from inference_service.sockets.frames import is_private

# It says the form of the frames: a front does not find the sockets of replicas that have another, and calls these
# through the handle.
SUFFIX = ".sock2"


def socket_folder(cluster: str, application: str) -> Path:
    """Of an application in one Ray cluster: another cluster's replicas may have its name, and even its store, and are
    none of its own; so are those that a head left behind when it died. Short: a socket's path has 107 bytes."""
    digest = hashlib.sha256(f"{cluster}\n{application}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"millrace-{os.geteuid()}" / digest


def make_private(folder: Path) -> None:
    """Raises `OSError` where it cannot be had for this user alone."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(f"{folder} must be this user's alone")


def sweep(root: Path) -> None:
    """Takes away what replicas that were killed have left in the folders below, of whichever application: nobody may
    ever look there again."""
    for folder in root.iterdir():
        if not is_private(folder):
            continue
        with suppress(OSError):  # another sweeps, too; or one lives here
            for path in folder.glob("*.sock*"):  # of earlier releases, too
                if _is_dead(path):
                    path.unlink(missing_ok=True)
            folder.rmdir()


def _is_dead(path: Path) -> bool:
    """Whether nobody listens. To one that lives this is a front that comes and goes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # it has no time for us, or has gone
            return False
    return False
