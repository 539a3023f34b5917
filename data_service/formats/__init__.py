"""What an import reads rows from, whatever the format: tables of logical columns, and bad rows to a sink."""

from data_service.formats.interface import BadRowSink, OpenSource, RowSource
from data_service.formats.opening import open_sources

__all__ = ["BadRowSink", "OpenSource", "RowSource", "open_sources"]
