from pathlib import Path

import pytest
import torch

from accel_ckpt import export_model, load_model_parts


@pytest.mark.parametrize("names", [["embedding"], ["head"], ["embedding", "head"]], ids="+".join)
def test_tensors_that_were_tied_when_written_are_found_under_each_name_that_is_wanted(
    tmp_path: Path, names: list[str]
) -> None:
    weight = torch.randn(3, 2)
    export_model({"embedding": weight, "head": weight}, tmp_path)
    found = load_model_parts(tmp_path, {name: torch.zeros(3, 2) for name in names})
    for name in names:
        assert torch.equal(found[name], weight)
