"""Everything a model and its optimizers may have goes from any strategy to any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel import Accelerator
from accel_testing import RankPool


class Odd(nn.Module):
    """Tied, frozen, narrow and uneven parameters, and buffers that are saved and that are not."""

    def __init__(self, fill: float, narrow: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(int(fill))
        self.embedding = nn.Embedding(7, 5)  # 7 rows over 2 ranks, and over 4
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.gain = nn.Parameter(torch.full((3,), fill))  # of 4 ranks one has nothing of it
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.narrow = nn.Parameter(torch.full((5,), fill).to(narrow), requires_grad=False)
        self.register_buffer("levels", torch.full((4,), fill).to(narrow))
        self.register_buffer("scratch", torch.full((2,), fill), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.frozen(self.embedding(ids))))
        return logits * self.gain.mean()


def prepared(
    strategy: str, fill: float, narrow: torch.dtype
) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A model with an optimizer of two groups, and another optimizer that has no state yet."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = Odd(fill, narrow)
    weights, others = [model.embedding.weight], [model.norm.weight, model.norm.bias]
    first = torch.optim.AdamW([{"params": weights, "lr": 0.1 * fill}, {"params": others, "weight_decay": fill}])
    second = torch.optim.SGD([model.gain], lr=0.01 * fill, momentum=0.9)
    return (accelerator, *accelerator.prepare(model, first, second))


def plain(value: Tensor) -> tuple[str, list[float]]:
    """A full tensor's dtype and values."""
    wide = value.detach().double()  # gloo does not gather 8 bits
    return str(value.dtype), (wide.full_tensor() if hasattr(wide, "full_tensor") else wide).flatten().tolist()


def snapshot(accelerator: Accelerator, model: nn.Module, optimizers: list[Any]) -> dict[str, object]:
    """All that is saved of them, whole."""
    backend = accelerator.backend
    held: dict[str, object] = {name: plain(value) for name, value in backend.states.model(model).items()}
    for number, optimizer in enumerate(optimizers):
        state = backend.states.optimizer(optimizer.optimizer, [model])
        held[f"groups {number}"] = [[group[key] for key in sorted(group)] for group in state["param_groups"]]
        for name, values in state["state"].items():
            held |= {f"{number} {name} {key}": plain(torch.as_tensor(value)) for key, value in values.items()}
    return held


def saved_by(strategy: str, folder: str, narrow: torch.dtype) -> dict[str, object]:
    accelerator, model, first, second = prepared(strategy, 2.0, narrow)
    for _ in range(2):
        accelerator.backward(model(torch.tensor([1, 2, 6])).square().mean())
        first.step()
        first.zero_grad()
        second.zero_grad()
    accelerator.save_state(folder)
    state = snapshot(accelerator, model, [first, second])
    accelerator.end_training()
    return state


def loaded_by(strategy: str, folder: str, narrow: torch.dtype) -> tuple[dict[str, object], list[float]]:
    accelerator, model, first, second = prepared(strategy, 3.0, narrow)
    accelerator.load_state(folder)
    state = snapshot(accelerator, model, [first, second])
    scratch: list[float] = dict(accelerator.unwrap_model(model).named_buffers())["scratch"].tolist()
    accelerator.backward(model(torch.tensor([1, 2, 6])).square().mean())
    first.step()
    second.step()
    accelerator.end_training()
    return state, scratch


@pytest.mark.parametrize(
    ("writer", "reader", "narrow"),
    [
        (("single", 1), ("fsdp", 4), torch.float8_e4m3fn),
        (("fsdp", 4), ("single", 1), torch.float8_e5m2),
        (("fsdp", 2), ("ddp", 2), torch.bfloat16),  # gloo, which DDP broadcasts with, does not know 8 bits
        (("ddp", 2), ("fsdp", 2), torch.float16),
    ],
    ids=str,
)
@pytest.mark.sampled(1)
def test_whatever_a_model_has_comes_back(
    rank_pool: RankPool, tmp_path: Path, writer: tuple[str, int], reader: tuple[str, int], narrow: torch.dtype
) -> None:
    folder = str(tmp_path / "a")
    saved = rank_pool.run(saved_by, writer[0], folder, narrow, ranks=writer[1])[0]
    assert saved["narrow"] == (str(narrow), [2.0] * 5)
    assert not any(name.startswith("1 ") for name in saved), "the second optimizer has no state yet"
    assert "scratch" not in saved
    for state, scratch in rank_pool.run(loaded_by, reader[0], folder, narrow, ranks=reader[1]):
        assert state == saved
        assert scratch == [3.0, 3.0], "what is not persistent stays the loading model's own"


class Versioned(nn.Linear):
    """A module with something of its own in its state dict."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ("v1", "v2"),
        ("v1", None),
        ({"name": "a", "scale": torch.ones(2)}, {}),
        (torch.ones(3), torch.zeros(0)),
        (None, torch.zeros(2)),
    ],
    ids=["texts", "text over none", "mapping", "other size", "none over tensor"],
)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.sampled(6)
def test_an_extra_state_is_whatever_its_module_makes_of_it(tmp_path: Path, saved: Any, here: Any, strict: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Versioned(saved))
    accelerator.save_state(tmp_path / "one")
    own = accelerator.unwrap_model(model)
    own.extra = here
    accelerator.load_state(tmp_path / "one", strict=strict)
    assert repr(own.extra) == repr(saved)
