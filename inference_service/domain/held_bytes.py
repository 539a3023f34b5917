"""How many bytes of requests this process has taken in and not answered, of all models together.

Queues are bounded in rows, which says nothing of how large they are: 4,096 encoded images may be some megabytes, or 200
gigabytes.
"""

from __future__ import annotations

from shared.errors import ResourceExhausted

# Sixteen of the largest messages. Each takes two to three times as much memory, since its message waits with its rows.
MAX_HELD_BYTES = 2**30
RETRY_AFTER_S = 0.2


class MemoryFull(ResourceExhausted):
    """What is held is of all models: it says nothing of the one that was asked."""


class HeldBytes:
    """Lives on one event loop."""

    def __init__(self, most: int = MAX_HELD_BYTES) -> None:
        self._most = most
        self._held = 0

    def take(self, size: int) -> None:
        """Until it is given back. One that is alone is taken, whatever its size; otherwise raises `MemoryFull`
        for what would be too much."""
        if self._held and self._held + size > self._most:
            raise MemoryFull(
                f"requests of {self._held} bytes wait already, of all models, and at most {self._most} may",
                reason="QUEUE_FULL",
                metadata={"queued_bytes": str(self._held), "max_queued_bytes": str(self._most)},
                retry_after_s=RETRY_AFTER_S,
            )
        self._held += size

    def give_back(self, size: int) -> None:
        self._held -= size

    def would_leave_half(self, size: int) -> bool:
        """Whether half of all would be left for others."""
        return self._held + size <= self._most // 2
