"""Tiny models, and one training loop for Megatron-LM and for one process."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_megatron import MegatronLMPlugin
from accel_precision.autocast import autocast_module
from accel_precision.policy import PrecisionPolicy
from accel_testing.equivalence.causal_lms import with_exact_layers, with_exact_loss

VOCABULARY, LENGTH, STEPS = 64, 12, 3
OF_ACCELERATOR = {"mixed_precision", "kwargs_handlers", "log_with", "project_dir", "parallelism_config"}


def make_model(kind: str, *, vocabulary: int = VOCABULARY, layers: int = 4, seed: int = 0) -> nn.Module:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        BertForPreTraining,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MegatronBertConfig,
        MegatronBertForMaskedLM,
        MegatronBertForPreTraining,
        MixtralConfig,
        MixtralForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(seed)
    if kind == "gpt2":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config: Any = GPT2Config(
            vocab_size=vocabulary,
            n_embd=32,
            n_layer=layers,
            n_head=4,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=0,
            **dropouts,
        )
        model: nn.Module = GPT2LMHeadModel(config)
    elif "bert" in kind:
        config_class: Any = MegatronBertConfig if "megatron" in kind else BertConfig
        pairs = MegatronBertForPreTraining if "megatron" in kind else BertForPreTraining
        words = MegatronBertForMaskedLM if "megatron" in kind else BertForMaskedLM
        dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        config = config_class(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=32,
            **dropouts,
        )
        model = (words if "words" in kind else pairs)(config)
    elif "t5" in kind:
        # Version 1.1 has gates, and does not scale its output.
        version = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if "gated" in kind else {}
        config = T5Config(
            vocab_size=vocabulary,
            d_model=32,
            d_kv=6,
            d_ff=48,
            num_layers=3,
            num_decoder_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=12,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            **version,
        )
        model = T5ForConditionalGeneration(config)
    else:
        sizes: dict[str, Any] = {
            "vocab_size": vocabulary,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
        }
        if kind == "mixtral":
            model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
        else:
            model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=kind == "llama tied"))
    with torch.no_grad():  # biases and norms start as constants, which would hide a permutation
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def samples(replica: int, step: int, count: int = 4, *, kind: str = "llama") -> dict[str, torch.Tensor]:
    """Samples of one data-parallel rank, with padding and as many targets in each rank's batch."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if "t5" in kind:  # the decoder's sequences have another length
        batch["labels"] = torch.randint(0, VOCABULARY, (count, LENGTH - 4), generator=generator)
        batch["labels"][1, -2:] = -100
    if "bert" in kind:
        words = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
        batch["labels"] = words.masked_fill(torch.arange(LENGTH) % 3 != 1, -100)
        batch["token_type_ids"] = (torch.arange(LENGTH) >= 5).long().expand(count, LENGTH)
        if "words" not in kind:
            batch["next_sentence_label"] = torch.randint(0, 2, (count,), generator=generator)
    if "uneven" in kind:  # most losses are in the second half of a sequence, whose length has few divisors
        batch = {name: value[:, : LENGTH - 2] if value.dim() > 1 else value for name, value in batch.items()}
        batch["labels"] = batch["labels"].clone()
        batch["labels"][::2, : batch["labels"].shape[1] // 2] = -100
    return batch


def on(device: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


@contextmanager
def accelerator(**options: Any) -> Iterator[Any]:
    from cuda_on_cpu import cuda_on_cpu

    steps, gpu = options.pop("gradient_accumulation_steps", 1), options.pop("gpu", False)
    own = {name: options.pop(name) for name in OF_ACCELERATOR & options.keys()}
    with nullcontext() if gpu else cuda_on_cpu():
        one = Accelerator(
            cpu=not gpu,
            strategy=MegatronLMPlugin(**{"gradient_clipping": 0, **options}),
            gradient_accumulation_steps=steps,
            **own,
        )
        try:
            yield one
        finally:
            one.free_memory()
            one.end_training()


def optimizer_of(model: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = [p for p in model.parameters() if p.dim() < 2]
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    # With a small epsilon AdamW divides gradients that are zero but for rounding by their size. Gradients of 16-bit
    # weights differ by more ("smooth").
    rate, eps = (0.1, 1.0) if kind == "smooth" else (1e-2, 1e-3)
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=rate, eps=eps
    )


def reference(
    model: nn.Module,
    replicas: int,
    *,
    kind: str = "adamw",
    accumulation: int = 1,
    clip: float | None = None,
    precision: str = "no",
    batches: str = "llama",
    device: str = "cpu",
) -> list[float]:
    """Trains in one process on the samples of all data-parallel ranks; returns the losses of replica 0."""
    model = autocast_module(model.to(device), PrecisionPolicy.parse(precision), device)
    optimizer = optimizer_of(model, kind)
    losses = []
    for step in range(STEPS):
        for part in range(accumulation):
            for replica in range(replicas):
                loss = model(**on(device, samples(replica, step * accumulation + part, kind=batches))).loss
                (loss / replicas / accumulation).backward()
                if replica == 0:
                    losses.append(float(loss.detach()))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(
    one: Any,
    model: Any,
    optimizer: Any,
    replica: int,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    batches: str = "llama",
) -> list[float]:
    """Trains by the ordinary loop, and returns the losses."""
    losses = []
    for step in range(STEPS * accumulation):
        with one.accumulate(model):
            loss = model(**on(one.device, samples(replica, step, kind=batches))).loss
            losses.append(float(loss.detach()))
            one.backward(loss)
            if one.sync_gradients and clip is not None:
                one.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def trained(
    options: dict[str, Any],
    steps: Iterable[int],
    *,
    kind: str = "llama",
    optimizer: str = "adamw",
    load: Path | None = None,
    save: Path | None = None,
    replica: int = 0,
    layers: int = 4,
) -> dict[str, torch.Tensor]:
    """Returns the weights after training on samples of ``replica``, from a checkpoint and into one.

    The default is the same samples on all replicas, so that their number does not matter.
    """
    with accelerator(**options) as one:
        source = make_model(kind, layers=layers)
        model, prepared = one.prepare(source, optimizer_of(source, optimizer))
        if load is not None:
            one.load_state(str(load))
        for step in steps:
            with one.accumulate(model):
                one.backward(model(**on(one.device, samples(replica, step, kind=kind))).loss)
                prepared.step()
                prepared.zero_grad()
        if save is not None:
            one.save_state(str(save))
        weights: dict[str, torch.Tensor] = one.get_state_dict(model)
        return weights


def open_window(one: Any, kind: str) -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns a model in an open window, its gradients, and those after they have been set as a load sets them."""
    source = make_model(kind)
    model, _ = one.prepare(source, optimizer_of(source))
    with one.accumulate(model):
        one.backward(model(**samples(one.process_index, 0)).loss)
    held = one.backend.gradients.unreduced(model)
    one.backend.gradients.set_unreduced(model, held)
    return model, held, one.backend.gradients.unreduced(model)


def reference_gradients(kind: str, replicas: int, *, accumulation: int = 1) -> dict[str, torch.Tensor | None]:
    """Returns the gradients, in one process, of the first batches of all replicas, by name."""
    model = make_model(kind)
    for replica in range(replicas):
        (model(**samples(replica, 0)).loss / replicas / accumulation).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    known = {name: value for name, value in other.items() if name in one}
    assert known.keys() == one.keys()
    return max((one[name].cpu() - value.cpu()).abs().max().item() for name, value in known.items())


def assert_trains_as_one_process(
    kind: str = "llama",
    *,
    tolerance: float = 1e-5,
    accumulation: int = 1,
    clip: float | None = None,
    optimizer: str = "adamw",
    layers: int = 4,
    dtype: torch.dtype = torch.float32,
    batches: str = "",
    **options: Any,
) -> None:
    """Asserts that losses and weights after training a model of ``kind`` are those of one process in fp64.

    ``dtype``: of the model that is prepared. ``batches``: "uneven", for labels that are unevenly spread.
    """
    batches = f"{kind} {batches}"
    with accelerator(gradient_accumulation_steps=accumulation, **options) as one:
        tensor, pipeline = options.get("tp_degree", 1), options.get("pp_degree", 1)
        context = options.get("context_parallel_size", 1)
        replicas = one.num_processes // (tensor * pipeline * context)
        replica = one.process_index // (tensor * context) % replicas
        expected = with_exact_layers(with_exact_loss(make_model(kind, layers=layers).double()))
        losses = reference(expected, replicas, kind=optimizer, accumulation=accumulation, clip=clip, batches=batches)
        source = make_model(kind, layers=layers).to(dtype)
        model, prepared = one.prepare(source, optimizer_of(source, optimizer))
        found = train(one, model, prepared, replica, accumulation=accumulation, clip=clip, batches=batches)
        if replica == 0:
            assert found == pytest.approx(losses, abs=tolerance)
        assert largest_difference(one.get_state_dict(model), expected.state_dict()) < tolerance
