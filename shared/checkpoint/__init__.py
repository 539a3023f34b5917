"""The checkpoint format, and the registry of committed checkpoints."""

from shared.checkpoint.format import Checkpoint, CheckpointContent, CoveragePart, load_checkpoint, write_checkpoint
from shared.checkpoint.ranking import Ranking
from shared.checkpoint.references import resolve, resolve_any
from shared.checkpoint.registry import CheckpointEntry, CheckpointRegistry

__all__ = [
    "Checkpoint",
    "CheckpointContent",
    "CheckpointEntry",
    "CheckpointRegistry",
    "CoveragePart",
    "Ranking",
    "load_checkpoint",
    "resolve",
    "resolve_any",
    "write_checkpoint",
]
