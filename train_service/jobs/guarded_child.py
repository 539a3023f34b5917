"""A question about what a stranger sent, put to a child process that is guarded: `entry_child.py`."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CHILD = Path(__file__).with_name("entry_child.py")
# To start Python, and to end all processes, besides the time that the task may take.
GUARD_S = 30.0
MAX_ANSWER_BYTES = 64 * 1024
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


def ask_in_child(question: Mapping[str, Any], work: Path, limits: Limits, *, namespaces: bool = True) -> dict[str, Any]:
    """The answer: `problem` says what is wrong, and is empty if nothing. `work` is the child's folder, `namespaces`
    says whether it gets its own where the kernel grants them. For the question see `entry_child`."""
    whole = {
        **question,
        "work": str(work),
        "path": [one for one in sys.path if one],
        "limits": asdict(limits),
        "namespaces": namespaces,
    }
    subject = "the files" if "weights" in question else "its module"
    command = [sys.executable, "-I", "-B", str(CHILD)]
    # Files, not pipes: a process that is left behind would keep a pipe open.
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
            return {"problem": f"{subject} took more than {limits.wall_s:g} s to be looked at"}
        finally:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        answered.seek(0)
        answer = answered.read(MAX_ANSWER_BYTES)
    try:
        record = json.loads(answer)
        return {**record, "problem": str(record["problem"])}
    except (ValueError, TypeError, KeyError):
        # The guard runs none of the user's code. Where it has no namespaces, that may still kill it.
        logger.warning("a guarded child ended without an answer, with status %d", status)
        return {"problem": f"{subject} ended the process that checks {'it' if subject == 'its module' else 'them'}"}


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
