"""What DeepSpeed does besides ZeRO, through an Accelerator: experts, hpZ, data types of transfers, disks."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_deepspeed import DeepSpeedBackend
from accel_state import BackendError, CheckpointError, ConfigError, PrepareError
from accel_testing import RankPool
from accel_testing.equivalence.compare import assert_close_state
from accel_testing.equivalence.equivalence import assert_equivalent
from accel_testing.equivalence.programs import adamw_program, sgd_program

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

WIDTH, EXPERTS = 6, 2


class Routed(nn.Module):
    """The best of two experts for each token, weighted by how sure the gate is: as DeepSpeed's layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sure, best = torch.softmax(self.gate(x), -1).max(-1)
        outputs = torch.stack([expert(x) for expert in self.experts])
        return outputs[best, torch.arange(len(x))] * sure[:, None]


class Mixture(nn.Module):
    """A layer, then experts of DeepSpeed, of which each rank has its share."""

    def __init__(self, reference: nn.Sequential, rank: int, ep_size: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.first = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(
            WIDTH,
            nn.Linear(WIDTH, WIDTH),
            EXPERTS,
            ep_size=ep_size,
            k=1,
            drop_tokens=False,
            use_rts=False,
            min_capacity=0,
        )
        self.first.load_state_dict(reference[0].state_dict())
        self.moe.deepspeed_moe.gate.wg.load_state_dict(reference[1].gate.state_dict())
        own = self.moe.deepspeed_moe.experts.deepspeed_experts
        for place, expert in enumerate(own):
            expert.load_state_dict(reference[1].experts[rank * len(own) + place if ep_size > 1 else place].state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, _, _ = self.moe(self.first(x))
        return output


def step_both(accelerator: Accelerator, trained: tuple[Any, Any], plain: tuple[Any, Any], both: torch.Tensor) -> None:
    """A step of what is trained on this rank's half of the samples, and of what one process trains on all of them."""
    half = both.chunk(2)[accelerator.process_index]
    accelerator.backward((trained[0](half) - 1).pow(2).mean())
    (plain[0](both) - 1).pow(2).mean().backward()
    for _, optimizer in (trained, plain):
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ep_size", [1, 2], ids=["replicated", "one each"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.sampled(2)
def test_experts_train_as_in_one_process(rank: int, stage: int, ep_size: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin={"zero_stage": stage})
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed())
    model = Mixture(reference, rank, ep_size)
    engine, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    plain = torch.optim.SGD(reference.parameters(), lr=0.2)
    for step in range(4):
        both = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        step_both(accelerator, (engine, optimizer), (reference, plain), both)
    assert torch.allclose(model.first.weight, reference[0].weight, atol=1e-6)
    mine = model.moe.deepspeed_moe.experts.deepspeed_experts
    for place, expert in enumerate(mine):
        number = rank * len(mine) + place if ep_size > 1 else place
        assert torch.allclose(expert.weight, reference[1].experts[number].weight, atol=1e-6)
    if ep_size == 1:
        accelerator.save_state(tmp_path / "state")
    else:
        with pytest.raises(BackendError, match="each rank has experts of its own"):
            accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "then"), [(0, 0), (1, 2), (2, 1)])
@pytest.mark.sampled(1)
def test_folders_with_experts_are_read_where_every_rank_has_all(
    rank: int, stage: int, then: int, tmp_path: Path
) -> None:
    from accel_state.collectives.objects import broadcast_object_list

    batches = torch.randn(6, 4, WIDTH, generator=torch.Generator().manual_seed(rank))

    def started(stage: int, ep_size: int = 1) -> tuple[Accelerator, Any, Any]:
        accelerator = Accelerator(cpu=True, deepspeed_plugin={"zero_stage": stage})
        torch.manual_seed(0)
        model = Mixture(nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed()), rank, ep_size)
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3))

    def trained(accelerator: Accelerator, model: Any, optimizer: Any, part: slice) -> dict[str, torch.Tensor]:
        for batch in batches[part]:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}

    run = started(stage)
    box = [str(tmp_path)]
    broadcast_object_list(box, 0)
    trained(*run, slice(3))
    run[0].export_deepspeed(box[0], tag="three")
    expected = trained(*run, slice(3, None))
    run[0].free_memory()
    run = started(then)
    run[0].import_deepspeed(box[0])
    assert_close_state(trained(*run, slice(3, None)), expected)
    run[0].free_memory()
    accelerator, *_ = started(stage, ep_size=2)
    accelerator.export_deepspeed(box[0], tag="spread")
    with pytest.raises(CheckpointError, match=r"spread over pipeline or expert|experts of which each rank had some"):
        accelerator.import_deepspeed(box[0], tag="spread")
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_experts_of_deepspeed_are_refused_at_stage_3_before_anything_is_changed(rank: int) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin={"zero_stage": 3})
    model = Mixture(nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed()), rank, 1)
    with pytest.raises(PrepareError, match=r"is of an expert of deepspeed\.moe.*nearest: zero_stage=2"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    assert not any(hasattr(parameter, "ds_id") for parameter in model.parameters())


class Experts(Routed):
    """The same experts, of which only those run that some token of this rank goes to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sure, best = torch.softmax(self.gate(x), -1).max(-1)
        output = torch.zeros_like(x)
        for number in best.unique().tolist():
            mine = best == number
            output[mine] = self.experts[number](x[mine]) * sure[mine, None]
        return output


@pytest.mark.ranks(2)
def test_ordinary_experts_train_at_stage_3_as_in_one_process(rank: int) -> None:
    """Each rank's tokens all go to another expert, so that ranks gather and reduce what they themselves do not use."""
    options = {"zero_stage": 3, "transformer_moe_cls_names": "Experts"}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=options)
    torch.manual_seed(0)
    reference, model = (nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts()) for _ in range(2))
    with torch.no_grad():
        reference.get_parameter("0.weight").copy_(torch.eye(WIDTH))
        reference.get_parameter("1.gate.weight").copy_(torch.tensor([[9.0], [-9.0]]).expand(EXPERTS, WIDTH))
    model.load_state_dict(reference.state_dict())
    engine, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    plain = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in range(4):
        tokens = torch.rand(8, WIDTH, generator=torch.Generator().manual_seed(step)) + 0.5
        both = torch.cat([tokens[:4], -tokens[4:]])
        step_both(accelerator, (engine, optimizer), (reference, plain), both)
    state = accelerator.backend.states.full_model(engine, main_only=False)
    for name, value in reference.named_parameters():
        assert torch.allclose(state[name], value, atol=1e-5), name
    accelerator.free_memory()


@pytest.mark.parametrize("layout", ["ds3:4/fp32", pytest.param("ds3:2/fp32/acc=3/short", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_hpz_of_zero_plus_plus_trains_as_one_process(rank_pool: RankPool, layout: str) -> None:
    options = '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}'
    assert_equivalent(adamw_program, [f"{layout}/hf_ds_config={options}"], pool=rank_pool)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_gradients_travel_in_the_type_that_is_asked_for(rank_pool: RankPool, stage: int) -> None:
    """In 16 bits they are as far from one process as those bits allow, and no farther."""
    layout = f"ds{stage}:2/fp32/communication_data_type=bf16"
    report = assert_equivalent(sgd_program, [layout], pool=rank_pool, tolerances={"fp32": 3e-2})
    assert report.results[0].distance > 1e-5


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "nearest: zero_hpz_partition_size"),
    ],
)
def test_what_deepspeed_cannot_do_here_is_refused(rank: int, options: dict[str, Any], words: str) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=options)
    model = nn.Linear(4, 2)
    with pytest.raises(ConfigError, match=words):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.ranks(1)
def test_experts_that_deepspeed_would_pack_are_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=r"expert_parallel\.enabled .*AutoEP gives each rank other experts"):
        Accelerator(cpu=True, deepspeed_plugin={"expert_parallel": {"enabled": True, "autoep_size": 2}})


class Wide(nn.Module):
    """Half of it in float64, made from numbers in float64 that are no parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        places = torch.arange(4, dtype=torch.float64) / 3
        self.narrow = nn.Linear(4, 4)
        self.start = nn.Parameter(places.float())
        self.wide = nn.Linear(4, 2, dtype=dtype)


@pytest.mark.ranks(2)
def test_what_is_built_in_float64_is_not_rounded_silently(rank: int) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin={"zero_stage": 3})
    words = r"Linear\.weight is built in float64 within building"
    with pytest.raises(PrepareError, match=words), accelerator.native(DeepSpeedBackend).zero_init():
        Wide(torch.float64)
    words = r"Linear\.bias is built in float64 within building"
    with pytest.raises(PrepareError, match=words), accelerator.native(DeepSpeedBackend).zero_init():
        nn.Linear(2, 2).register_parameter("bias", nn.Parameter(torch.randn(2, dtype=torch.float64) * 2))
    with accelerator.native(DeepSpeedBackend).zero_init():
        model = Wide(torch.float32)
    assert model.wide.weight.ds_shape == (2, 4)
    assert Wide(torch.float64).wide.weight.dtype == torch.float64
    accelerator.end_training()


@pytest.mark.ranks(1)
def test_inference_by_deepspeed_is_refused_on_cpus(rank: int) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin={"zero_stage": 0, "inference": {}})
    with pytest.raises(BackendError, match="does not work on CPUs"):
        accelerator.prepare_model(nn.Linear(4, 2), evaluation_mode=True)


def built(operation: str) -> bool:
    """Whether an operation is there already; building it takes longer than a test may."""
    from accel_deepspeed.library import extensions_folder

    return (extensions_folder() / operation / f"{operation}.so").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(built, ("async_io", "cpu_adam"))),
    reason="async_io or cpu_adam is not built; with libaio, hatch run deepspeed-operations --disk builds them",
)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("param", "precision", "bound", "shared"),
    [("none", "no", 1e-5, 1), ("nvme", "no", 1e-5, 1), ("nvme", "bf16", 1e-2, 1), ("nvme", "no", 1e-5, 2)],
)
def test_states_on_a_disk_train_as_in_one_process(
    rank: int, tmp_path: Path, param: str, precision: str, bound: float, shared: int
) -> None:
    """Large enough to be on the disk at all: DeepSpeed keeps what is below a MB of a rank's in memory."""
    specs = [
        {"patterns": [r".*0\.weight$"], "partition_type": "column"},
        {"patterns": [r".*2\.weight$"], "partition_type": "row"},
    ]

    def wide() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 512))

    def prepared() -> tuple[Accelerator, Any, Any]:
        disk = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": str(tmp_path / "disk")}
        if param == "nvme":
            disk |= {"offload_param_device": "nvme", "offload_param_nvme_path": str(tmp_path / "disk")}
        plugin: dict[str, Any] = {"zero_stage": 3, **disk}
        if shared > 1:
            plugin["tensor_parallel"] = {"autotp_size": shared, "partition_config": {"layer_specs": specs}}
        accelerator = Accelerator(
            cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=2, mixed_precision=precision
        )
        model = wide()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    reference = wide()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    accelerator, engine, optimizer = prepared()
    meter = accelerator.meter(every=1)
    for step in range(6):
        if step == 3:
            accelerator.save_state(tmp_path / "state")
            accelerator.free_memory()
            accelerator, engine, optimizer = prepared()
            accelerator.load_state(tmp_path / "state")
            meter = accelerator.meter(every=1)
        for part in range(2):
            both = torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + part))
            with accelerator.accumulate(engine):
                loss = engine(both.chunk(2 // shared)[rank // shared]).pow(2).mean()
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(engine.parameters(), 0.1) if accelerator.sync_gradients else None
                optimizer.step()
                optimizer.zero_grad()
            (reference(both).pow(2).mean() / 2).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert norm is not None
        assert torch.isclose(norm, expected, rtol=10 * bound)
        plain.step()
        plain.zero_grad()
        meter.step(loss)
    accelerator.backward(engine(both).pow(2).mean())
    with pytest.raises(BackendError, match="gone to the disk"):
        accelerator.clip_grad_value_(engine.parameters(), 0.1)
    optimizer.zero_grad()
    written = [file for file in (tmp_path / "disk").rglob("*") if file.is_file() and file.stat().st_size >= 2**20]
    assert any("optimizer" in str(file) for file in written)
    assert any("param" in str(file) for file in written) == (param == "nvme")
    state = accelerator.backend.states.full_model(engine, main_only=False)
    accelerator.free_memory()
    for name, value in reference.named_parameters():
        assert float((state[name] - value).abs().max()) <= bound, name
