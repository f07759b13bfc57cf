"""Private names of DeepSpeed: there in the version they were read in, and missed without harm."""

import logging
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from accel_deepspeed import private
from accel_deepspeed.library import library

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.ranks(1),
]


def warnings_of_check() -> list[str]:
    library("cpu")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("accel_deepspeed")
    log.addHandler(handler)
    private.check.__wrapped__()
    log.removeHandler(handler)
    return said


def test_the_installed_version_has_all_names(rank: int) -> None:
    assert version("deepspeed") == private.READ_IN
    assert len(private.NAMES) <= 10
    assert warnings_of_check() == []


def test_a_version_without_them_is_warned_of_and_goes_on(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library("cpu")
    for name, (owner, _) in private.NAMES.items():
        monkeypatch.delattr(private._owner(owner), name)
    said = warnings_of_check()
    assert len(said) == len(private.NAMES)
    assert any("_init_tp_mesh_device" in one and "tensor parallelism is refused" in one for one in said)
    assert private.module_counter() == [0]
    assert private.open_tensor_parallel_groups(2) is False
    private.skip_comparison()()
    private.forget_groups()
    private.forget_parameters()
    own = SimpleNamespace(cpu_offload=False, single_partition_of_fp32_groups=[object()])
    private.share_weights(own)
    assert vars(own).keys() == {"cpu_offload", "single_partition_of_fp32_groups"}
