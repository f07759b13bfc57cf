"""Batch sizes shrink while memory runs out, and only then."""

import gc
import weakref

import pytest
import torch

from accel_state import clear_device_cache, find_executable_batch_size, release_memory, should_reduce_batch_size

SEQUENCE = [128, 115, 103, 92, 82, 73, 65, 58, 52, 46, 41, 36, 32, 28, 25, 22, 19, 17, 15, 13, 11, 9, 8]


@pytest.fixture(autouse=True)
def cheap_collections():
    """What the test session holds already is not looked at again by each of many collections."""
    gc.freeze()
    yield
    gc.unfreeze()


class Holder:
    """Something that a weak reference can watch."""


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")


def test_sizes_fall_by_a_tenth():
    tried = []

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size):
        tried.append(batch_size)
        if batch_size > 8:
            full()
        return batch_size

    assert train() == 8
    assert tried == SEQUENCE
    assert train() == 8  # remembered
    assert tried == [*SEQUENCE, 8]


def test_another_rule_of_reduction_is_used():
    sizes = iter([50, 20, 7])

    @find_executable_batch_size(starting_batch_size=100, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size, least):
        if batch_size > least:
            full()
        return batch_size

    assert train(20) == 20


@pytest.mark.parametrize("size", [100, 128])
def test_a_rule_that_does_not_reduce_is_an_error_and_no_endless_search(size):
    @find_executable_batch_size(starting_batch_size=100, reduce_batch_size_fn=lambda: size)
    def train(batch_size):
        full()

    with pytest.raises(RuntimeError, match=f"reduce_batch_size_fn returned {size} after memory had run out at 100"):
        train()


def test_usable_without_arguments_and_keeps_the_name():
    @find_executable_batch_size
    def train(batch_size, extra=1):
        """Doc."""
        return batch_size, extra

    assert (train(), train.__name__, train.__doc__) == ((128, 1), "train", "Doc.")


def test_other_errors_pass_through_at_once():
    calls = []

    @find_executable_batch_size
    def train(batch_size):
        calls.append(batch_size)
        raise ValueError("unrelated")

    with pytest.raises(ValueError, match="unrelated"):
        train()
    assert calls == [128]


def test_no_size_at_all_is_an_error_and_the_next_call_tries_anew():
    tried = []

    @find_executable_batch_size(starting_batch_size=3)
    def train(batch_size):
        tried.append(batch_size)
        full()

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"No executable batch size found, reached zero\."):
            train()
    assert tried == [3, 2, 1] * 2


def test_passing_the_batch_size_oneself_is_refused():
    @find_executable_batch_size
    def train(batch_size, model):
        return batch_size

    with pytest.raises(TypeError, match=r"Batch size was passed into `train`.*`train\(model=m\)`"):
        train(64, "m")


def test_a_failed_attempt_leaves_nothing_alive():
    watched = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        if watched:
            assert watched[0]() is None
            return batch_size
        held = Holder()
        watched.append(weakref.ref(held))
        full()

    assert train() == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA out of memory. Tried"), True),
        (RuntimeError("XPU out of memory. Tried"), True),
        (RuntimeError("MPS backend out of memory (used)"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA out of memory.", "twice"), False),
        (RuntimeError("shapes do not match"), False),
        (ValueError("CUDA out of memory."), False),
        (torch.OutOfMemoryError("anything"), True),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert should_reduce_batch_size(error) is expected


def test_real_exhaustion_of_the_cpu_counts():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert should_reduce_batch_size(caught.value)


def test_released_objects_are_gone():
    gc.disable()
    try:
        one, other = Holder(), Holder()
        one.cycle = one
        watched = weakref.ref(one)
        one, other = release_memory(one, other)
        assert one is None
        assert other is None
        gc.collect()
        assert watched() is None
    finally:
        gc.enable()


def test_clearing_caches_starts_no_device():
    clear_device_cache(garbage_collection=True)
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error: unhandled cuda error. Last error:\nCuda failure 2 'out of memory'",
    ],
)
def test_every_library_of_cuda_says_in_its_way_that_memory_ran_out(text: str) -> None:
    assert should_reduce_batch_size(RuntimeError(text))
    assert not should_reduce_batch_size(RuntimeError("CUDA error: an illegal memory access was encountered"))
