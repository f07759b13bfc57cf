"""The thread that polls for failures of other ranks: it is in no request when the interpreter ends."""

import threading
import time
from pathlib import Path

import pytest

from accel_data.failure_relay import ThreadStore
from accel_testing import run_script

POLLING = """
import time
import torch.distributed as dist
from accel_data import failure_relay

failure_relay._INTERVAL = 1e-5  # a request is always under way
dist.init_process_group("gloo")
watches = [failure_relay.alarm().watch() for _ in range(8)]
dist.barrier()
time.sleep(0.3)
print("done", flush=True)
"""


def test_a_run_that_ends_while_a_pass_is_open_succeeds(tmp_path: Path) -> None:
    (tmp_path / "polling.py").write_text(POLLING)
    finished = run_script(tmp_path / "polling.py", ranks=2).check()
    assert [output[-2000:] for output in finished.outputs if not output.endswith("done\n")] == []


class SlowStore:
    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def get(self, key: str) -> bytes:
        self.asked.set()
        assert self.answers.wait(10)
        return key.encode()


def test_the_end_waits_for_a_request_and_lets_no_other_begin() -> None:
    slow = SlowStore()
    store = ThreadStore(slow)  # type: ignore[arg-type]
    found: list[bytes] = []
    asking = threading.Thread(target=lambda: found.append(store.get("key")))
    asking.start()
    assert slow.asked.wait(10)
    ending = threading.Thread(target=store._gate.close)
    ending.start()
    time.sleep(0.1)
    assert ending.is_alive()
    slow.answers.set()
    for thread in (asking, ending):
        thread.join(10)
    assert found == [b"key"]
    with pytest.raises(RuntimeError, match="the interpreter ends"):
        store.get("key")
