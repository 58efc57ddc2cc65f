"""A queue in which clients take turns."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class _Queued(Protocol):
    @property
    def client(self) -> str: ...


Item = TypeVar("Item", bound=_Queued)


class Waiting(Generic[Item]):
    """Items of each client in the order in which they came; the clients take turns."""

    def __init__(self) -> None:
        self._size = 0
        self._queues: dict[str, deque[Item]] = {}  # the client whose turn it is comes first

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Item]:
        """Go through the items in the order in which `take` returns them."""
        queues = deque(deque(queue) for queue in self._queues.values())
        while queues:
            queue = queues.popleft()
            yield queue.popleft()
            if queue:
                queues.append(queue)

    def add(self, item: Item) -> None:
        """Add an item after the other items of its client."""
        self._queues.setdefault(item.client, deque()).append(item)
        self._size += 1

    def first(self) -> Item | None:
        """Return the item whose turn it is, without removing it."""
        return next(iter(self._queues.values()))[0] if self._queues else None

    def take(self) -> Item:
        """Remove the item whose turn it is, and return it."""
        client = next(iter(self._queues))
        queue = self._queues.pop(client)
        item = queue.popleft()
        self._size -= 1
        if queue:
            self._queues[client] = queue  # at the end
        return item

    def remove(self, wanted: Callable[[Item], bool]) -> list[Item]:
        """Remove all items for which `wanted` is true, and return them."""
        queues, self._queues = self._queues, {}
        removed: list[Item] = []
        for client, queue in queues.items():
            kept: deque[Item] = deque()
            for item in queue:  # asked once: another thread may change the answer
                (removed if wanted(item) else kept).append(item)
            if kept:
                self._queues[client] = kept
        self._size -= len(removed)
        return removed
