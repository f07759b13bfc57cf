"""Degrees that are given to ``accel launch`` reach the backend of a script that names none."""

from pathlib import Path

import pytest

from accel_testing.programs.runs import launch
from accel_testing.ranks.launchers import free_port

TRAIN = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from accel import Accelerator

def made():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )
    model = LlamaForCausalLM(config)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

axis, backend = sys.argv[1:]
tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))
accelerator = Accelerator()
assert accelerator.num_processes == 2, accelerator.num_processes
assert accelerator.choice.name == backend, accelerator.choice
assert f"{axis}=2" in str(accelerator.explain()), accelerator.explain()
assert accelerator.data_shard.count == 1, accelerator.data_shard
expected, stepping = made()
model, optimizer = accelerator.prepare(*made())
for _ in range(2):
    plain = expected(input_ids=tokens, labels=tokens).loss
    plain.backward()
    stepping.step()
    stepping.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    assert abs(float(loss.detach()) - float(plain.detach())) < 1e-4, (loss, plain)
state = accelerator.get_state_dict(model)
for name, value in expected.named_parameters() if accelerator.is_main_process else ():
    assert torch.allclose(state[name], value, atol=1e-4), name
accelerator.end_training()
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("axis", "backend"),
    [("tp", "fsdp"), ("cp", "fsdp"), pytest.param("sp", "fsdp", marks=pytest.mark.slow), ("pp", "pipeline")],
)
def test_a_degree_of_a_launch_is_served(tmp_path: Path, axis: str, backend: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    port = ("--main_process_port", str(free_port()))
    options = ("--cpu", "--num_processes", "2", *port, f"--parallelism_config_{axis}_size", "2")
    launch(script, axis, backend, options=options, timeout=300).check()
