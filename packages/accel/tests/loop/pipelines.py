"""Tiny models of transformers for pipelines, and the same training in one process."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from accel import Accelerator
from accel_backends import PipelineParallelConfig
from accel_state import ParallelismConfig
from accel_testing.equivalence.causal_lms import (
    VOCABULARY,
    tiny_gpt2,
    tiny_llama,
    tiny_mixtral,
    with_exact_layers,
    with_exact_loss,
)

LENGTH, SAMPLES, BATCH = 12, 48, 4


def llama(*, tie: bool = False, blocks: int = 4) -> nn.Module:
    return with_exact_layers(with_exact_loss(tiny_llama(num_hidden_layers=blocks, tie_word_embeddings=tie)))


def gpt2() -> nn.Module:
    return with_exact_loss(tiny_gpt2(n_layer=4))


def mixtral() -> nn.Module:
    return with_exact_layers(with_exact_loss(tiny_mixtral(use_cache=False)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama tied": lambda: llama(tie=True),
    "gpt2": gpt2,
}


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Token ids, of which a part is padding without a label."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
        self.lengths = torch.randint(3, LENGTH + 1, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        real = torch.arange(LENGTH) < self.lengths[index]
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": real.long(), "labels": torch.where(real, tokens, -100)}


def loader(batch_size: int = BATCH) -> Any:
    return torch.utils.data.DataLoader(Texts(), batch_size=batch_size)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": decayed}], lr=0.01)


def accelerator_of(degrees: dict[str, int], config: dict[str, Any], **options: Any) -> Accelerator:
    return Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**degrees),
        strategy=PipelineParallelConfig(**config),
        **options,
    )


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, batches: Iterable[Any], *, clip: float | None = None
) -> list[float]:
    """The loop of a user."""
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip is not None:
                losses.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train_plainly(
    name: str, *, batch_size: int = BATCH, accumulated: int = 1, clip: float | None = None, dtype: Any = torch.float64
) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    model = MODELS[name]().to(dtype)
    optimizer = optimizer_of(model)
    losses = []
    for number, batch in enumerate(loader(batch_size)):
        loss = model(**batch).loss
        (loss / accumulated).backward()
        if (number + 1) % accumulated == 0:
            if clip is not None:
                losses.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, optimizer, losses


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    scale = float(expected.abs().max()) or 1.0
    return float((found - expected).abs().max()) / scale


def full_state(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of all stages on every rank."""
    state = [copy.copy(accelerator.get_state_dict(model))]
    torch.distributed.broadcast_object_list(state, src=0)
    return state[0]
