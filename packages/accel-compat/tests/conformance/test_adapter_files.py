"""Files of FSDP with the adapter alone, which the Trainer writes for models of peft."""

import pytest
import torch


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_frozen_weights_stay_out_of_the_files_of_an_adapter(tmp_path, kind):
    peft = pytest.importorskip("peft", reason="hatch run conformance:test")
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, load_fsdp_model, save_fsdp_model

    def adapted():
        inner = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
        return peft.get_peft_model(inner, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))

    plugin, accelerator = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind), Accelerator(cpu=True)
    saved, loaded = adapted(), adapted()
    frozen = {name: one.clone() for name, one in loaded.named_parameters() if not one.requires_grad}
    save_fsdp_model(plugin, accelerator, saved, tmp_path, adapter_only=True)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 64 * 64 * 4
    load_fsdp_model(plugin, accelerator, loaded, tmp_path, adapter_only=True)
    for (name, one), other in zip(loaded.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(one, other if one.requires_grad else frozen[name]), name
