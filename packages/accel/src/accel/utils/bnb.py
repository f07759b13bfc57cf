"""Quantized models, under Accelerate's import path."""

from accel_inference import get_keys_to_not_convert as get_keys_to_not_convert
from accel_inference import has_4bit_bnb_layers as has_4bit_bnb_layers
from accel_inference import load_and_quantize_model as load_and_quantize_model
