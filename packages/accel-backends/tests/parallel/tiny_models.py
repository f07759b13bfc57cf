"""Tiny transformers models with random weights, and one process's training of them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accel_testing.equivalence.causal_lms import VOCABULARY, tiny_gpt2, tiny_llama, tiny_mixtral

LENGTH, BATCH = 16, 2


def llama(*, tie: bool = False, heads: int = 4, blocks: int = 2, **options: Any) -> nn.Module:
    return tiny_llama(
        num_hidden_layers=blocks, num_attention_heads=8, num_key_value_heads=heads, tie_word_embeddings=tie, **options
    )


def mixtral(**options: Any) -> nn.Module:
    return tiny_mixtral(**options)


def qwen3() -> nn.Module:
    """Llama's blocks with a norm of each head's queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        pad_token_id=40,  # in the shard of the last rank
    )
    return Qwen3ForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama tied": lambda: llama(tie=True),
    "llama of 5 blocks": lambda: llama(tie=True, blocks=5),
    "gpt2": tiny_gpt2,
    "mixtral": mixtral,
    "qwen3": qwen3,
}

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def tokens(step: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(step))


def next_token_loss(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Mean over all tokens of the loss of the token after each."""
    return F.cross_entropy(logits.flatten(0, 1), batch.roll(-1, 1).flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    losses = []
    for step in range(steps):
        batch = tokens(step)
        loss = next_token_loss(model(input_ids=batch, use_cache=False).logits, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def full(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    scale = float(expected.abs().max()) or 1.0
    return float((found - expected).abs().max()) / scale


def assert_states_equal(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    expected: nn.Module,
    expected_optimizer: torch.optim.Optimizer,
    tolerance: float,
) -> None:
    """Compares full state dicts of model and optimizer with those of one process, name by name."""
    state, wanted = model.state_dict(), expected.state_dict()
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        assert distance(full(state[name]), value) <= tolerance, name
    pairs = zip(model.named_parameters(), expected.parameters(), strict=True)
    for (name, parameter), other in pairs:
        for key, value in expected_optimizer.state[other].items():
            assert distance(full(optimizer.state[parameter][key]), value) <= tolerance, f"{name} {key}"
