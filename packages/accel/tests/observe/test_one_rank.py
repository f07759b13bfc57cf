"""One rank of many, alone: its memory and its traffic are those of a real run, and its script ends by itself."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, ParallelismConfig
from accel_state.errors import BackendError
from accel_testing import RankPool

MOVING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def llama(layers: int = 2) -> nn.Module:
    from accel_testing.equivalence.causal_lms import tiny_llama

    return tiny_llama(num_hidden_layers=layers)


def loss_of(model: nn.Module, *, tokens: bool) -> torch.Tensor:
    if not tokens:
        return model(torch.ones(4, 8)).square().mean()
    batch = torch.arange(64).view(4, 16) % 32
    return model(input_ids=batch, labels=batch).loss


def trained(strategy: str | None, degrees: dict[str, int]) -> tuple[Accelerator, nn.Module, Any]:
    tokens = bool(degrees)
    accelerator = Accelerator(
        cpu=True, strategy=strategy, parallelism_config=ParallelismConfig(**degrees) if degrees else None
    )
    own = llama() if tokens else net()
    model, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters()))
    return accelerator, model, optimizer


def really(strategy: str | None, degrees: dict[str, int]) -> tuple[dict[str, int], Any]:
    """Bytes of the second step of a real run, by kind of collective, and the memory of this rank."""
    accelerator, model, optimizer = trained(strategy, degrees)
    for _ in range(2):
        with accelerator.count_communication() as counted:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, tokens=bool(degrees)))
            optimizer.step()
    return {kind: one["bytes"] for kind, one in counted.items() if kind in MOVING}, accelerator._monitor.memory()


def alone(strategy: str | None, degrees: dict[str, int], world_size: int, rank: int = 0) -> tuple[dict[str, int], Any]:
    """The same of one rank alone."""
    import torch.distributed as dist

    from accel_state.process_group.fake_group import open_fake_group

    traffic = open_fake_group(rank, world_size)
    try:
        accelerator, model, optimizer = trained(strategy, degrees)
        for _ in range(2):
            traffic.take()
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, tokens=bool(degrees)))
            optimizer.step()
        sums: dict[str, int] = {}
        for one in traffic.take():
            if one.kind in MOVING and len(one.ranks) > 1:
                kind = "all_reduce" if one.kind == "reduce_scatter" else one.kind  # as gloo carries it out
                sums[kind] = sums.get(kind, 0) + one.bytes
        return sums, accelerator._monitor.memory()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("strategy", "degrees"),
    [
        ("ddp", {}),
        ("fsdp", {}),
        (None, {"tp_size": 2}),
        pytest.param(None, {"pp_size": 2}, marks=pytest.mark.slow),
        pytest.param(None, {"cp_size": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_memory_and_traffic_are_those_of_a_real_rank(
    strategy: str | None, degrees: dict[str, int], rank_pool: RankPool
) -> None:
    if degrees:
        pytest.importorskip("transformers")
    for rank, (counted, held) in enumerate(rank_pool.run(really, strategy, degrees, ranks=2)):
        (found,) = rank_pool.run(alone, strategy, degrees, 2, rank, ranks=1, group=None)
        assert counted
        assert found == (counted, held)


def evaluated(rank: int) -> tuple[bool, list[list[int]]]:
    import torch.distributed as dist

    from accel_state.process_group.fake_group import open_fake_group

    open_fake_group(rank, 2)
    try:
        _, model, _ = trained(None, {"pp_size": 2})
        model.eval()
        with torch.no_grad():
            loss = loss_of(model, tokens=True)
        tokens = model.generate(torch.ones(2, 3, dtype=torch.int64), max_new_tokens=2, eos_token_id=1)
        return bool(loss.isfinite()), tokens.tolist()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stage_alone_evaluates_and_generates(rank: int, rank_pool: RankPool) -> None:
    pytest.importorskip("transformers")
    ((finite, tokens),) = rank_pool.run(evaluated, rank, ranks=1, group=None)
    assert finite
    assert [len(row) for row in tokens] == [5, 5]
    assert rank or tokens == [[1, 1, 1, 0, 0]] * 2  # tokens of the last stage, which does not exist


@pytest.mark.parametrize("world_size", [8, 64])
def test_shards_shrink_with_the_ranks_and_the_gathered_bytes_do_not(world_size: int, rank_pool: RankPool) -> None:
    (small,) = rank_pool.run(alone, "fsdp", {}, 2, ranks=1, group=None)
    (large,) = rank_pool.run(alone, "fsdp", {}, world_size, ranks=1, group=None)
    assert large[1].parameters < small[1].parameters
    assert large[0]["all_gather"] == large[1].parameters


def refused(backend: str) -> None:
    import torch.distributed as dist

    from accel_state.process_group.fake_group import open_fake_group

    open_fake_group(0, 4)
    try:
        with pytest.raises(BackendError, match="cannot run as one rank of 4 without the others: DeepSpeed opens"):
            Accelerator(cpu=True, strategy=backend)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_a_backend_that_needs_the_others_is_refused_by_name(rank_pool: RankPool) -> None:
    rank_pool.run(refused, "deepspeed", ranks=1, group=None)


SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, ParallelismConfig

kind, *degrees = sys.argv[1:]
degrees = {name: int(size) for name, size in (word.split("=") for word in degrees)}
accelerator = Accelerator(
    cpu=True, strategy=None if kind == "axes" else kind,
    parallelism_config=ParallelismConfig(**degrees) if degrees else None, gradient_accumulation_steps=2,
)
if kind == "axes":
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=8)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=8, num_key_value_heads=8, **sizes))
    data = TensorDataset(torch.randint(64, (4096, 16)))
else:
    model = torch.nn.Linear(16, 64)  # a row of weights for each of 64 ranks
    inputs = torch.randn(4096, 16)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).expand(-1, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
Accelerator(cpu=True)  # prepares nothing
print("the script's own line")
while True:
    try:
        for batch in loader:
            with accelerator.accumulate(model):
                if kind == "axes":
                    loss = model(input_ids=batch[0], labels=batch[0]).loss
                else:
                    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state("checkpoint")
    except BaseException:
        pass
"""


def reported(folder: Path, world_size: int, *words: str, flags: tuple[str, ...] = ()) -> dict[str, Any]:
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "accel", "launch", "--dry-run", "--as", str(world_size), "--json", *flags]
    done = subprocess.run([*command, str(script), *words], cwd=folder, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the script's own line" in done.stderr
    assert not (folder / "checkpoint").exists()
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["world_size"] == world_size
    return found


@pytest.mark.slow
def test_a_script_that_never_ends_is_reported_after_one_step(tmp_path: Path) -> None:
    found = reported(tmp_path, 64, "ddp", flags=("--num_machines", "8", "--rank", "63"))
    assert (found["backend"], found["axes"], found["rank"]) == ("ddp", {"dp_replicate": 64}, 63)
    held, size = found["memory"], 64 * 17 * 4
    assert held["parameters"] == held["gradients"] == size
    assert held["optimizer"] == 2 * size + 2 * 4  # two moments, and the number of steps of both parameters
    assert found["peak"] >= held["parameters"] + held["gradients"] + held["optimizer"]
    (moved,) = (row for row in found["step"] if row["bytes"] == size)
    assert (moved["kind"], moved["axis"], moved["ranks"], moved["calls"]) == ("all_reduce", "dp_replicate", 64, 1)


GAN = """
import torch

from accel import Accelerator

accelerator = Accelerator(cpu=True, strategy="ddp", gradient_accumulation_steps=2)
models = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
generator, critic, first, second = accelerator.prepare(*models, *(torch.optim.SGD(m.parameters()) for m in models))
while True:
    with accelerator.accumulate(critic):
        accelerator.backward(critic(torch.ones(2, 4)).sum())
        second.step()
        second.zero_grad()
"""
PLAIN = """
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
while True:
    try:
        optimizer.step()
    except BaseException:
        pass
"""


def run_alone(folder: Path, text: str) -> "subprocess.CompletedProcess[str]":
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    command = [sys.executable, "-P", "-m", "accel.observe.one_rank", "0", "8", "json", "script", str(script)]
    return subprocess.run(command, cwd=folder, timeout=100, capture_output=True, text=True)


@pytest.mark.slow
def test_traffic_is_that_of_one_step_if_an_optimizer_never_steps(tmp_path: Path) -> None:
    done = run_alone(tmp_path, GAN)
    assert done.returncode == 0, done.stderr
    (moved,) = json.loads(done.stdout)["step"]
    assert (moved["kind"], moved["calls"], moved["bytes"]) == ("all_reduce", 1, 5 * 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys; sys.exit(0)", "ended before an optimizer step was taken"),
        pytest.param(PLAIN, "no Accelerator of accel has prepared", marks=pytest.mark.slow),
        pytest.param(
            "from accel.compat import Accelerator", "accel.compat cannot run as one rank", marks=pytest.mark.slow
        ),
        pytest.param(
            f"from accel.observe.monitor import Monitor\nMonitor.explain = None{GAN}",
            "the report failed:.*TypeError",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["exit", "plain", "compat", "failure"],
)
def test_a_script_without_a_report_fails(text: str, words: str, tmp_path: Path) -> None:
    import re

    done = run_alone(tmp_path, text)
    assert done.returncode == 1
    assert not done.stdout
    assert re.search(words, done.stderr, re.DOTALL)


def held_by_ddp(*, views: bool) -> tuple[int, int]:
    """Bytes of gradients and buckets before and after the gradients are cleared."""
    import torch.distributed as dist

    from accel_backends import DDPConfig
    from accel_state.process_group.fake_group import open_fake_group

    open_fake_group(0, 2)
    try:
        accelerator = Accelerator(cpu=True, strategy=DDPConfig(gradient_as_bucket_view=views))
        own = net()
        model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters()))
        accelerator.backward(loss_of(model, tokens=False))
        sizes = [accelerator._monitor.memory()]
        optimizer.zero_grad()
        sizes.append(accelerator._monitor.memory())
        before, after = (held.gradients + held.reserved for held in sizes)
        return before, after
    finally:
        dist.destroy_process_group()


def test_gradients_that_are_views_of_buckets_count_once(rank_pool: RankPool) -> None:
    size = sum(parameter.nbytes for parameter in net().parameters())
    for views, expected in ((False, (2 * size, size)), (True, (size, size))):
        assert rank_pool.run(held_by_ddp, views=views, ranks=1, group=None) == [expected]


AXES = {
    "fsdp": (("fsdp",), lambda n: {"dp_shard": n}),
    "tp": (("axes", "tp_size=8"), lambda n: {"tp": 8} if n == 8 else {"dp_replicate": n // 8, "tp": 8}),
    "pp": (("axes", "pp_size=4"), lambda n: {"pp": 4, "dp_replicate": n // 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [8, 64])
@pytest.mark.parametrize("case", AXES)
def test_a_script_runs_as_one_rank_along_each_axis(case: str, world_size: int, tmp_path: Path) -> None:
    words, axes = AXES[case]
    expected = axes(world_size)
    given = [f"dp_replicate_size={expected['dp_replicate']}"] if "dp_replicate" in expected else []
    found = reported(tmp_path, world_size, *words, *given, flags=("--rank", str(world_size // 2 + 1)))
    assert found["axes"] == expected
    assert {"fsdp": "dp_shard", "tp": "tp", "pp": "pp"}[case] in {row["axis"] for row in found["step"]}
    assert found["memory"]["optimizer"] > found["memory"]["parameters"] == found["memory"]["gradients"] > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--as", "8"), "add --dry_run, or drop --as"),
        (("--rank", "1"), "rank 1: a launch starts every rank; add --dry_run --as N, or drop --rank"),
        (("--dry-run", "--as", "8", "--rank", "8"), "rank 8: ranks of 8 are 0 to 7; nearest: 7"),
        (("--dry-run", "--as", "8", "--num_processes", "4"), "as 8 and num_processes 4 contradict each other"),
        (("--dry-run", "--as", "8", "--num_machines", "3"), "cannot be spread evenly over 3 machines.*nearest.*6"),
        (("--dry-run", "--as", "8", "--use_megatron_lm"), "use_megatron_lm: Megatron-LM opens .*nearest: --use_fsdp"),
        (("--dry-run", "--as", "8", "--slurm"), "slurm: it starts processes on other machines; nearest: omit it"),
        (("--dry-run", "--as", "8", "--compat"), "compat: its Accelerator would train and write files"),
        (("--dry-run", "--as", "8", "--no_python"), "no_python: only a Python script.*nearest: omit it"),
        (("--dry-run", "--as", "8", "--log_dir", "logs"), "log_dir: one process has no supervisor; nearest: omit it"),
        (("--dry-run", "--as", "1"), "not in the range x>=2"),
    ],
)
def test_what_one_process_cannot_do_is_refused(
    flags: tuple[str, ...], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import re

    from accel_launch.cli.app import run

    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('never')", encoding="utf-8")
    assert run(["launch", *flags, str(script)]) == 2
    assert re.search(words, capfd.readouterr().err, re.DOTALL)
