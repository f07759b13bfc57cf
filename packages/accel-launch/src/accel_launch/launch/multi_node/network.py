"""Network interface of this machine that leads to an address."""

import contextlib
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_NAME = 16  # bytes for an interface's name in struct ifreq, see netdevice(7)


def interface_to(address: str) -> str | None:
    """Returns the interface over which the IPv4 host ``address`` is reached; sends no packet.

    None if that is the loopback interface, which other machines cannot reach, or if it cannot be determined.
    """
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # for a datagram socket, connect only chooses the route
        mine = probe.getsockname()[0]
        if not mine.startswith("127."):
            return next((name for _, name in socket.if_nameindex() if _address_of(name, probe) == mine), None)
    return None


def _address_of(name: str, probe: socket.socket) -> str | None:
    import fcntl

    try:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[: _NAME - 1]))
    except OSError:  # the interface has no IPv4 address
        return None
    return socket.inet_ntoa(answer[_NAME + 4 : _NAME + 8])  # skips the family and port of struct sockaddr_in
