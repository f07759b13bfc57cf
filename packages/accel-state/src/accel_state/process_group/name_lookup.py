"""The lookups of peers' names by torch's stores, which a process can do without."""

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache

_WARNING = b"hostname of the client socket cannot be retrieved"


@cache
def stop_name_lookups() -> None:
    """Makes torch's stores in this process show addresses in place of names, until the process ends.

    For its log alone, a TCPStore looks up the name of each address that it connects to or that connects to it
    (``formatSockAddr`` in ``torch/csrc/distributed/c10d/socket.cpp``). A name server is asked about the loopback
    address too, as /etc/hosts hardly ever has that in IPv6's notation. Rank 0's store serves no rank meanwhile: a query
    that is lost costs all ranks 5 s. torch looks up no more names in a process once a lookup has failed. Here the first
    one fails at once: that of a store which is closed again, opened while this thread's resolver asks no server.

    Lookups of the program, also those of this thread, are as before. Nothing is changed where the C library is not
    glibc, or where another service than DNS knows the name of the loopback address.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with suppress(AttributeError, OSError, RuntimeError), _without_name_servers(), _without_warning():
        TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)


@contextmanager
def _without_name_servers() -> Iterator[None]:
    """Lookups of this thread fail where they would ask a name server; AttributeError without glibc.

    The resolver's state belongs to the thread, and <resolv.h> declares how it begins: ``int retrans, retry``.
    """
    library = ctypes.CDLL(None)
    library.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    state = library.__res_state()
    if library.__res_ninit(state) != 0:  # otherwise the first lookup would set it up, with all attempts
        raise OSError("the resolver has no state")
    attempts, state[1] = state[1], 0
    try:
        yield
    finally:
        state[1] = attempts


@contextmanager
def _without_warning() -> Iterator[None]:
    """What is written to stderr meanwhile appears there afterwards, without torch's warning about a failed lookup."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            for line in written:
                if _WARNING not in line:
                    os.write(2, line)
