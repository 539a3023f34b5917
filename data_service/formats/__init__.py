"""The formats of an import's sources: each yields tables of logical columns, and passes bad rows to a sink."""

from data_service.formats.interface import BadRowSink, OpenSource, RowSource
from data_service.formats.opening import open_sources

__all__ = ["BadRowSink", "OpenSource", "RowSource", "open_sources"]
