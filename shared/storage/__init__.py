"""Access to the object store. Other packages use it only through this module."""

from shared.storage.object_store import (
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    key_problem,
    open_store,
    probe,
)

__all__ = ["ObjectExists", "ObjectInfo", "ObjectMissing", "ObjectStore", "key_problem", "open_store", "probe"]
