"""Over the stages of a pipeline a model trains as it does on one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from accel_backends.parallel.pipeline import Pipeline
from accel_backends.parallel.stages import block_ranges
from accel_state.errors import ConfigError, PrepareError

from .tiny_models import MODELS, OPTIMIZERS, distance, llama, next_token_loss, tokens


def pp_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))


def batch_of(step):
    return torch.cat([tokens(10 * step + part) for part in range(2)])


def assert_trains_as_one_process(name, optimizer, schedule, dtype=torch.float64, tolerance=1e-10):
    """With two batches in each accumulation window."""
    expected, model = MODELS[name]().to(dtype), MODELS[name]().to(dtype)
    size = sum(parameter.numel() for parameter in model.parameters())
    pipeline = Pipeline(model, pp_mesh(), next_token_loss, num_microbatches=4, schedule=schedule)
    assert sum(parameter.numel() for parameter in model.parameters()) < size
    optimizers = [OPTIMIZERS[optimizer](one.parameters()) for one in (expected, model)]
    for step in range(3):
        for batch in (batch_of(step), batch_of(step + 7)):
            loss = next_token_loss(expected(input_ids=batch, use_cache=False).logits, batch)
            loss.backward()
            assert float(pipeline.run(batch, batch)) == pytest.approx(float(loss.detach()), rel=tolerance)
        for one in optimizers:
            one.step()
            one.zero_grad()
    state = expected.state_dict()
    owned = {key: distance(value, state[key]) for key, value in model.state_dict().items()}
    assert max(owned.values()) <= tolerance
    names: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(names, set(owned))
    assert set.union(*names) == set(state)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", ["llama", "llama tied", "gpt2"])
def test_two_stages_train_as_one_process(rank, name, schedule):
    assert_trains_as_one_process(name, "adamw", schedule)


@pytest.mark.ranks(4)
def test_four_stages_train_as_one_process(rank):
    assert_trains_as_one_process("llama of 5 blocks", "sgd", "1f1b")


@pytest.mark.ranks(2)
def test_two_stages_train_as_one_process_in_single_precision(rank):
    assert_trains_as_one_process("gpt2", "sgd", "gpipe", torch.float32, 1e-5)


def test_blocks_are_divided_evenly():
    assert [len(one) for one in block_ranges(7, 3)] == [3, 2, 2]
    with pytest.raises(PrepareError, match=r"2 blocks do not make 3 pipeline stages; nearest: 2 stages"):
        block_ranges(2, 3)


class WithNorm(nn.Module):
    """A base model that registers its last norm first."""

    def __init__(self, base):
        super().__init__()
        self.embed_tokens, self.norm, self.layers = base.embed_tokens, base.norm, base.layers


@pytest.mark.ranks(2)
def test_what_cannot_be_split_is_refused_before_any_change(rank):
    mesh = pp_mesh()
    with pytest.raises(PrepareError, match=r"Linear has no base_model"):
        Pipeline(nn.Linear(2, 2), mesh, next_token_loss, num_microbatches=2)
    model = llama()
    model.model = WithNorm(model.model)
    with pytest.raises(PrepareError, match=r"WithNorm has norm before its list of blocks; only embeddings"):
        Pipeline(model, mesh, next_token_loss, num_microbatches=2)
    assert len(list(model.model.layers.parameters())) == len(list(llama().model.layers.parameters()))
    with pytest.raises(ConfigError, match=r"no pipeline schedule 'zb'; schedules: 1f1b, gpipe"):
        Pipeline(llama(), mesh, next_token_loss, num_microbatches=2, schedule="zb")
    with pytest.raises(ConfigError, match=r"1 micro-batches for a pipeline of 2 stages; nearest: num_microbatches=2"):
        Pipeline(llama(), mesh, next_token_loss, num_microbatches=1)
    pipeline = Pipeline(llama(), mesh, next_token_loss, num_microbatches=4)
    with pytest.raises(PrepareError, match=r"batch of 2 samples does not divide into 4 micro-batches"):
        pipeline.run(tokens(0), tokens(0))
