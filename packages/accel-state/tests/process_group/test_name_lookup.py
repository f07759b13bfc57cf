"""Sessions open without asking a name server about their peers, and without a word about it."""

import subprocess
import sys
from pathlib import Path

import pytest

from accel_testing.programs.runs import run_command

# Runs in namespaces of its own, in which the only name server receives queries and answers none.
ALONE = """
import fcntl, socket, struct, subprocess, sys

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
    fcntl.ioctl(link, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS: up
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
server.setblocking(False)
with open("resolv.conf", "w") as file:
    file.write("nameserver 127.0.0.1\\noptions timeout:1 attempts:1\\n")
subprocess.run(["mount", "--bind", "resolv.conf", "/etc/resolv.conf"], check=True)
subprocess.run([sys.executable, "ranks.py"], check=True)
try:
    while query := server.recv(4096):
        labels, rest = [], query[12:]
        while rest[0]:
            labels.append(rest[1 : 1 + rest[0]].decode())
            rest = rest[1 + rest[0] :]
        print("asked for", ".".join(labels))
except BlockingIOError:
    pass
"""
RANKS = """
from accel_testing.programs.runs import run_script
print(run_script("opens.py", ranks=2).check().output, end="")
"""
OPENS = """
import socket, threading
import torch
from accel_state import Session

def ask(name):
    try:
        socket.getaddrinfo(name, 80, family=socket.AF_INET)
    except socket.gaierror as error:
        assert error.errno == socket.EAI_AGAIN, error

with Session.open(cpu=True) as session:
    session.gather(torch.ones(2))
    if session.is_main_process:
        ask("main.example")
        other = threading.Thread(target=ask, args=("other.example",))
        other.start()
        other.join()
    session.wait_for_everyone()
"""
NAMESPACES = ["unshare", "--map-root-user", "--net", "--mount"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs namespaces")
@pytest.mark.slow
def test_name_servers_are_asked_by_the_program_only(tmp_path: Path) -> None:
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        pytest.skip("the kernel gives this user no namespaces")
    for name, text in {"alone.py": ALONE, "ranks.py": RANKS, "opens.py": OPENS}.items():
        (tmp_path / name).write_text(text)
    # The variable is as for a user's processes, and not as conftest.py sets it for tests.
    finished = run_command([*NAMESPACES, sys.executable, "alone.py"], cwd=tmp_path, env={"RES_OPTIONS": ""})
    assert finished.check().output.splitlines() == ["asked for main.example", "asked for other.example"]
