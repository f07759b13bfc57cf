"""Files of a model for other tools: safetensors or torch's, in shards with an index."""

import json
import os
import re
from typing import Any

from accel_compat.checkpoints.pickles import clean_state_dict_for_safetensors
from accel_inference import convert_file_size_to_int, id_tensor_storage

_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.)")


def shards(state: dict[str, Any], limit: int) -> list[dict[str, Any]]:
    """Divides tensors, in their order, into groups of at most ``limit`` bytes; tied ones are in one group."""
    groups: list[dict[str, Any]] = [{}]
    size = 0
    homes: dict[Any, dict[str, Any]] = {}
    for name, tensor in state.items():
        key = id_tensor_storage(tensor)
        if key in homes:
            homes[key][name] = tensor
            continue
        num_bytes = tensor.numel() * tensor.element_size()
        if groups[-1] and size + num_bytes > limit:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        homes[key] = groups[-1]
        size += num_bytes
    return groups


def save_model_files(
    accelerator: Any, state: dict[str, Any], folder: Any, max_shard_size: int | str, *, safe_serialization: bool
) -> None:
    """Writes the weights, and an index if there are several files; files of an earlier save are removed."""
    stem, ending = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    tensors = clean_state_dict_for_safetensors(state) if safe_serialization else dict(state)
    limit = max_shard_size if isinstance(max_shard_size, int) else convert_file_size_to_int(max_shard_size)
    groups = shards(tensors, limit)
    names = [f"{stem}.{ending}"]
    if len(groups) > 1:
        names = [f"{stem}-{number:05d}-of-{len(groups):05d}.{ending}" for number in range(1, len(groups) + 1)]
    index = os.path.join(folder, f"{stem}.{ending}.index.json")
    if accelerator.is_main_process:
        for name in os.listdir(folder):
            plain = _SHARD.sub("", name)
            if plain == f"{stem}.{ending}" and name not in names:
                os.remove(os.path.join(folder, name))
        if os.path.exists(index):
            os.remove(index)
    for name, group in zip(names, groups, strict=True):
        accelerator.save(group, os.path.join(folder, name), safe_serialization=safe_serialization)
    if len(groups) == 1 or not accelerator.is_main_process:
        return
    total = sum(tensor.numel() * tensor.element_size() for group in groups for tensor in group.values())
    table = {key: name for name, group in zip(names, groups, strict=True) for key in group}
    with open(index, "w", encoding="utf-8") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": table}, file, indent=2, sort_keys=True)
        file.write("\n")
