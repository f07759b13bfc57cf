"""Client: SFT, DPO and GRPO of trl, and LoRA of peft in a loop of Accelerate, on tiny models.

tuners.py VARIANT...
"""

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import clients
import torch
import transformers
from datasets import Dataset
from torch.utils.data import DataLoader

STEPS = 6
COLOURS, ANIMALS = ("red", "green", "blue", "black", "white"), ("cat", "dog", "fox", "owl", "bee")
transformers.logging.set_verbosity_error()


def tokenizer() -> Any:
    """Words of the sentences below, one token each."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["<pad>", "<end>", "<unknown>", "the", "is", "and", "a", ".", *COLOURS, *ANIMALS]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unknown>"))
    made.pre_tokenizer = Whitespace()
    ends = {"pad_token": "<pad>", "eos_token": "<end>", "bos_token": "<end>", "unk_token": "<unknown>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **ends)


def pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """A colour and an animal for each sample."""
    chosen = random.Random(seed)
    return [(chosen.choice(COLOURS), chosen.choice(ANIMALS)) for _ in range(count)]


def common(folder: Path, **given: Any) -> dict[str, Any]:
    """Arguments with a global batch of 8 samples at each micro-step, whatever the processes."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8 // clients.world_size(),
        "max_steps": STEPS,
        "learning_rate": 5e-3,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 7,
        "disable_tqdm": True,
        **given,
    }


def trained(trainer: Any, folder: Path) -> Mapping[str, Any]:
    """What a trainer of trl logs."""
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps
    trainer.save_model(str(folder / "final"))
    return {"losses": clients.losses(trainer), "evaluated": clients.losses(trainer, "eval_loss")}


def sft(folder: Path, **more: Any) -> Mapping[str, Any]:
    from trl import SFTConfig, SFTTrainer

    words = tokenizer()
    texts = [[f"the {c} {a} is {c} and a {a} ." for c, a in pairs(*one)] for one in ((128,), (21, 1))]
    rows = [Dataset.from_dict({"text": one}) for one in texts]
    given = common(folder, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3)
    options = SFTConfig(**given, max_length=32, dataset_text_field="text", per_device_eval_batch_size=3)
    model = clients.tiny_model(tokens=len(words))
    trainer = SFTTrainer(
        model=model, args=options, train_dataset=rows[0], eval_dataset=rows[1], processing_class=words, **more
    )
    return trained(trainer, folder)


def sft_lora(folder: Path) -> Mapping[str, Any]:
    from peft import LoraConfig

    return sft(folder, peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def dpo(folder: Path) -> Mapping[str, Any]:
    from trl import DPOConfig, DPOTrainer

    words = tokenizer()
    chosen = {
        "prompt": [f"the {c} {a} is" for c, a in pairs(96)],
        "chosen": [f" {c} and a {a} ." for c, a in pairs(96)],
        "rejected": [f" {a} and a {c} ." for c, a in pairs(96)],
    }
    options = DPOConfig(**common(folder), max_length=32, beta=0.1)
    models = {name: clients.tiny_model(tokens=len(words)) for name in ("model", "ref_model")}
    rows = Dataset.from_dict(chosen)
    return trained(DPOTrainer(**models, args=options, train_dataset=rows, processing_class=words), folder)


def grpo(folder: Path) -> Mapping[str, Any]:
    from trl import GRPOConfig, GRPOTrainer

    words = tokenizer()
    rows = Dataset.from_dict({"prompt": [f"the {c} {a} is" for c, a in pairs(48)]})
    given = common(folder, max_steps=3)
    options = GRPOConfig(**given, num_generations=4, max_completion_length=6)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [one.count("a") / (1 + len(one)) for one in completions]

    model = clients.tiny_model(tokens=len(words))
    trainer = GRPOTrainer(model=model, args=options, train_dataset=rows, processing_class=words, reward_funcs=reward)
    trainer.train()
    return {"steps": trainer.state.global_step}


def lora(folder: Path) -> Mapping[str, Any]:
    """LoRA in the loop of Accelerate's documentation; the saved adapter computes the same."""
    from accelerate import Accelerator
    from peft import LoraConfig, PeftModel, get_peft_model

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    base = clients.tiny_model()
    torch.manual_seed(1)
    options = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(base, options)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=5e-3)
    loader = DataLoader(clients.Rows(96), batch_size=8 // accelerator.num_processes)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)).mean().item())
    accelerator.wait_for_everyone()
    trained_model = accelerator.unwrap_model(model)
    weights = accelerator.get_state_dict(model)
    trained_model.save_pretrained(folder, is_main_process=accelerator.is_main_process, state_dict=weights)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        again = PeftModel.from_pretrained(clients.tiny_model(), folder).eval()
        row = clients.Rows(1)[0]["input_ids"][None]
        with torch.no_grad():
            torch.testing.assert_close(again(input_ids=row).logits, trained_model.eval()(input_ids=row).logits)
    accelerator.wait_for_everyone()
    return {"losses": losses}


VARIANTS = {one.__name__: one for one in (sft, sft_lora, dpo, grpo, lora)}

if __name__ == "__main__":
    clients.run(VARIANTS, sys.argv[1:])
