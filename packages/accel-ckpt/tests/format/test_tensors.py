"""Memory of tensors as bytes."""

import gc
import weakref

import torch

from accel_ckpt.format.tensors import byte_view


def test_a_view_has_all_bytes_of_its_tensor_and_keeps_it() -> None:
    tensor = torch.arange(5, dtype=torch.int32)
    view, held = byte_view(tensor), weakref.ref(tensor)
    assert (len(view), view.readonly, bytes(view)) == (20, False, b"".join(n.to_bytes(4, "little") for n in range(5)))
    view[0] = 7
    assert tensor[0] == 7
    del tensor
    gc.collect()
    assert held() is not None
    del view
    gc.collect()
    assert held() is None


def test_no_type_is_made_for_each_size() -> None:
    """It took fifty times as long as the view of a small tensor."""
    assert len({type(byte_view(torch.zeros(size)).obj) for size in range(1, 5)}) == 1
