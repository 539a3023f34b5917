"""A training function that looks for the store's keys in its own process, and asks for what is not its job's.

It goes into a bundle of code as it is. `config`:

    wanted      by name, texts to look for; each in two halves, so that the search itself is not what it finds
    job         the id of its job
    to_read, to_write   keys of the store

What it found is the file `found.json` of its checkpoint.
"""

from __future__ import annotations

import gc
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray.train

CHUNK_BYTES = 4 * 1024 * 1024
OVERLAP_BYTES = 256
KEEPERS_OF_KEYS = ("StoreSettings", "ObjectStore", "Presigner", "Minio")

Wanted = dict[str, list[str]]


def loop(config: dict[str, Any]) -> None:
    wanted: Wanted = config["wanted"]
    planted = "".join(wanted["planted"]).encode()  # the search finds what there is
    found = {
        "environ": names_in(Path("/proc/self/environ").read_bytes(), wanted),
        "cmdline": names_in(Path("/proc/self/cmdline").read_bytes(), wanted),
        "memory": names_in_memory(wanted),
        "objects": [repr(one) for one in gc.get_objects() if type(one).__name__ in KEEPERS_OF_KEYS],
    }
    assert planted
    (store,) = [one for one in gc.get_objects() if type(one).__name__ == "SignedStore"]
    tried = {}
    for key in config["to_read"]:
        tried[f"read {key}"] = refusal_of(lambda key=key: store.get(key))  # type: ignore[misc]
    for key in config["to_write"]:
        tried[f"write {key}"] = refusal_of(lambda key=key: store.put(key, b"forged"))  # type: ignore[misc]
    own = f"trainingJobs/{config['job']}/logs/a00001/r0000/99999990.txt"
    store.put(own, b"")
    address = store._address("PUT", own).replace(config["job"], "other", 1)
    forged = urllib.request.Request(address, data=b"forged", method="PUT")
    tried["forged address"] = refusal_of(lambda: urllib.request.urlopen(forged))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "found.json").write_text(json.dumps({"found": found, "tried": tried}))
        ray.train.report({"loss": 1.0}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def names_in(data: bytes, wanted: Wanted) -> list[str]:
    return sorted(name for name, (first, second) in wanted.items() if has(data, first.encode(), second.encode()))


def has(data: bytes, first: bytes, second: bytes) -> bool:
    at = data.find(first)
    while at >= 0:
        end = at + len(first)
        if data[end : end + len(second)] == second:
            return True
        at = data.find(first, at + 1)
    return False


def names_in_memory(wanted: Wanted) -> list[str]:
    found: set[str] = set()
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for begin, end in resident_regions():
            for start in range(begin, end, CHUNK_BYTES):
                memory.seek(start)
                try:
                    data = memory.read(min(CHUNK_BYTES + OVERLAP_BYTES, end - start))
                except OSError:  # unmapped since
                    continue
                found.update(names_in(data, {name: wanted[name] for name in wanted.keys() - found}))
    return sorted(found)


def resident_regions() -> Iterator[tuple[int, int]]:
    """The process's own: what is only read there is the libraries' code."""
    begin = end = 0
    is_own = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(bound, 16) for bound in name.split("-"))
            is_own = rest[0].startswith("rw") and "[v" not in line
        elif name == "Rss:" and is_own and int(rest[0]):
            yield begin, end


def refusal_of(call: Callable[[], object]) -> str:
    """Empty where nothing was refused."""
    try:
        call()
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
