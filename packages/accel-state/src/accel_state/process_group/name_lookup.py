"""Reverse DNS lookups by torch's stores, and how to disable them."""

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
    """Makes torch's stores in this process log addresses instead of host names, until the process ends.

    Only for its log, a TCPStore looks up the host name of each address that it connects to or accepts
    (``formatSockAddr`` in ``torch/csrc/distributed/c10d/socket.cpp``). The lookup queries DNS for the loopback address
    too, because /etc/hosts rarely lists its IPv6 form. Meanwhile rank 0's store serves no rank: a lost query costs all
    ranks 5 s. torch disables these lookups for a process once one has failed. This function makes the first lookup fail
    at once: it opens and drops a store while this thread's resolver sends no queries.

    Other lookups of the program, also those of this thread, are unaffected. Nothing changes if the C library is not
    glibc, or if another service than DNS resolves the loopback address.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with suppress(AttributeError, OSError, RuntimeError), _without_name_servers(), _without_warning():
        TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)


@contextmanager
def _without_name_servers() -> Iterator[None]:
    """Makes DNS lookups of this thread fail without a query inside the block; AttributeError without glibc.

    The resolver's state is per thread; <resolv.h> declares its first fields as ``int retrans, retry``.
    """
    library = ctypes.CDLL(None)
    library.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    state = library.__res_state()
    if library.__res_ninit(state) != 0:  # otherwise the first lookup would initialise it, with all attempts
        raise OSError("the resolver has no state")
    attempts, state[1] = state[1], 0
    try:
        yield
    finally:
        state[1] = attempts


@contextmanager
def _without_warning() -> Iterator[None]:
    """Holds back stderr during the block and replays it afterwards, without torch's warning about a failed lookup."""
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
