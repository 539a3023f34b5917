"""Markers `live/upload/{d}/{uid}.json` of the uploads that may still have bytes, so that a sweep need not look at all
the uploads that there ever were."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace

from shared.durable import Durable, as_state, fields_of
from shared.storage import ObjectMissing, ObjectStore

FOLDER = "live/upload"


@dataclass(frozen=True)
class LiveUpload(Durable):
    """Times are in seconds since the epoch; `gone_at` is None as long as nobody saw that it is gone."""

    uid: str
    name: str
    marked_at: float
    gone_at: float | None = None


class LiveUploads:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def mark(self, uid: str, name: str) -> None:
        """To be called before the upload's log says that there is one."""
        self._put(LiveUpload(uid, name, time.time()))

    def set_gone(self, live: LiveUpload, now: float) -> None:
        self._put(replace(live, gone_at=now))

    def forget(self, uid: str, name: str) -> None:
        self._store.delete(_key(uid, name))

    def markers(self, dataset: str = "") -> list[str]:
        """The keys of all, or of those of `datasets/{d}`, sorted."""
        folder = f"{FOLDER}/{dataset.removeprefix('datasets/')}" if dataset else FOLDER
        return sorted(info.key for info in self._store.list(folder))

    def read(self, key: str) -> LiveUpload | None:
        """None where another sweep was faster."""
        try:
            return LiveUpload(**fields_of(LiveUpload, json.loads(self._store.get(key))))
        except ObjectMissing:
            return None

    def find(self, uid: str, name: str) -> LiveUpload | None:
        return self.read(_key(uid, name))

    def _put(self, live: LiveUpload) -> None:
        self._store.put(_key(live.uid, live.name), json.dumps(as_state(live)).encode())


def _key(uid: str, name: str) -> str:
    return f"{FOLDER}/{name.split('/')[1]}/{uid}.json"
