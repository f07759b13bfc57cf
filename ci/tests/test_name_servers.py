"""Tests ask no name server: one that is slow, or loses queries, would keep torch's stores waiting."""

import socket
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RES_OPTIONS is read by glibc")


def ask() -> int:
    """The error that looking up a name which no file has ends with."""
    with pytest.raises(socket.gaierror) as caught:
        socket.getaddrinfo("no-such-host.invalid", 80)
    return caught.value.errno


# A name server would have answered that there is no such name, EAI_NONAME.
def test_tests_ask_none() -> None:
    assert ask() == socket.EAI_AGAIN


@pytest.mark.ranks(2)
def test_ranks_ask_none() -> None:
    assert ask() == socket.EAI_AGAIN
