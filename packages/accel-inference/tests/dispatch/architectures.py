"""Tiny models with random weights, all but the UNet of transformers, and inputs for them."""

import torch
import transformers as t

from . import unet

VOCABULARY = 64
SIZE = {"vocab_size": VOCABULARY}
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


def _ids():
    return {"input_ids": torch.arange(12).reshape(2, 6) % VOCABULARY}


def _pixels():
    return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)}


def _both():
    return {**_ids(), "decoder_input_ids": torch.arange(8).reshape(2, 4)}


ARCHITECTURES = {
    "llama": (t.LlamaForCausalLM, t.LlamaConfig(**TEXT, intermediate_size=48), _ids),
    "llama-tied": (t.LlamaForCausalLM, t.LlamaConfig(**TEXT, intermediate_size=48, tie_word_embeddings=True), _ids),
    "gpt2": (t.GPT2LMHeadModel, t.GPT2Config(**SIZE, n_embd=32, n_layer=3, n_head=4, n_positions=64), _ids),
    "qwen2": (t.Qwen2ForCausalLM, t.Qwen2Config(**TEXT, intermediate_size=48, num_key_value_heads=2), _ids),
    "mistral": (t.MistralForCausalLM, t.MistralConfig(**TEXT, intermediate_size=48, num_key_value_heads=2), _ids),
    "mixtral": (
        t.MixtralForCausalLM,
        t.MixtralConfig(**TEXT, intermediate_size=48, num_key_value_heads=2, num_local_experts=4),
        _ids,
    ),
    "opt": (t.OPTForCausalLM, t.OPTConfig(**TEXT, ffn_dim=48, word_embed_proj_dim=32), _ids),
    "bert": (t.BertForMaskedLM, t.BertConfig(**TEXT, intermediate_size=48), _ids),
    "albert": (t.AlbertModel, t.AlbertConfig(**TEXT, embedding_size=16, intermediate_size=48), _ids),
    "distilbert": (t.DistilBertModel, t.DistilBertConfig(**SIZE, dim=32, n_layers=3, n_heads=4, hidden_dim=48), _ids),
    "t5": (
        t.T5ForConditionalGeneration,
        t.T5Config(**SIZE, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0),
        _both,
    ),
    "bart": (
        t.BartForConditionalGeneration,
        t.BartConfig(
            vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        ),
        _both,
    ),
    "vit": (
        t.ViTForImageClassification,
        t.ViTConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, image_size=16,
                    patch_size=4),
        _pixels,
    ),
    "unet": (unet.UNet, unet.UNetConfig(), unet.inputs),
}  # fmt: skip
GENERATING = ("llama", "llama-tied", "gpt2", "qwen2", "mistral", "mixtral", "opt", "t5", "bart")


def make(name):
    """A model with the weights of its name, in evaluation mode."""
    kind, config, _ = ARCHITECTURES[name]
    torch.manual_seed(len(name))
    return kind(config).eval()


def inputs_of(name):
    return ARCHITECTURES[name][2]()
