"""The object store that all stages share, and the names of what is in it."""

from tasks.store import layout
from tasks.store.store import MANIFEST, CorruptObject, Store, folder_objects

__all__ = ["MANIFEST", "CorruptObject", "Store", "folder_objects", "layout"]
