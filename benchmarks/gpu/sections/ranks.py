"""Two ranks on one GPU: whether NCCL connects them, then tests with the marker ``gpu_ranks``."""

import os
import socket
import subprocess
import sys

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.sections.tests import files, tested

# NCCL refuses two ranks of one host on one device, so each names a host of its own and they connect through sockets.
OVER_SOCKETS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
}
PROBE = """
import torch, torch.distributed as dist
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
value = torch.ones(1, device="cuda")
dist.all_reduce(value)
assert value.item() == 2.0, value
dist.destroy_process_group()
"""


def run(bench: Bench) -> None:
    bench.attempt("two ranks", lambda: two_ranks(bench), cuda="two ranks on one device; pytest runs them on the CPU")


def two_ranks(bench: Bench) -> None:
    refusal = probe()
    bench.row("probe", "NCCL with two ranks on one device", "connects" if refusal is None else refusal[-500:])
    # Without NCCL, gloo still carries tensors of the device.
    chosen = [] if refusal is None else ["-k", "gloo"]
    tested(bench, "pytest", ["-m", "gpu_ranks", "--require=gpu_ranks", *chosen, *files("gpu_ranks")])


def probe(seconds: float = 20) -> str | None:
    """Why NCCL does not connect two ranks here; None if it does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, **OVER_SOCKETS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROBE],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"host{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = []
    try:
        for rank in ranks:
            said.append(rank.communicate(timeout=seconds)[0])
    except subprocess.TimeoutExpired:
        return f"no answer in {seconds:.0f} s"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return None if all(rank.returncode == 0 for rank in ranks) else next(filter(str.strip, said), "no output")
