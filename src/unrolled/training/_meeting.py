"""How the processes of one start find each other under torchrun.

The torchrun of torch 2.13 keeps one store of keys and values over restarts. In this store, new processes find
the addresses of dead processes and fail to connect to them. So each start needs a key prefix of its own.
torchrun tells its processes nothing that is new at each start and the same on all machines, hence the first
process makes up the prefix. Every other process writes a name to the store, reads the prefix from the key of
this name, and confirms it by a key under the prefix. The first process also answers names that dead processes
have left, but these are never confirmed.
"""

import time
import uuid

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

SECONDS = 600


def met() -> tuple[Store, int, int]:
    """Return a store of this start only, the rank of this process and the number of processes.

    Raises:
        TimeoutError: another process has not started within ten minutes.
    """
    store, rank, size = next(rendezvous("env://"))
    own = uuid.uuid4().hex
    if rank == 0:
        return _received(store, own, size), rank, size
    store.set(f"unrolled/name/{rank}", own)
    started = PrefixStore(store.get(f"unrolled/prefix/{own}").decode(), store)  # waits
    started.set(f"here/{rank}", "")
    return started, rank, size


def _received(store: Store, prefix: str, size: int) -> Store:
    started, answered = PrefixStore(prefix, store), set()
    deadline = time.monotonic() + SECONDS
    while not started.check([f"here/{rank}" for rank in range(1, size)]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of the {size} processes have started within {SECONDS} seconds")
        for rank in range(1, size):
            key = f"unrolled/name/{rank}"
            if store.check([key]) and (name := store.get(key)) not in answered:
                store.set(f"unrolled/prefix/{name.decode()}", prefix)
                answered.add(name)
        time.sleep(0.01)
    return started
