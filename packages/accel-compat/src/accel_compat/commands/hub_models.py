"""Models of a hub by name, as arguments of ``accel estimate-memory``, which reads folders."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def local_model(words: Sequence[str]) -> Iterator[list[str]]:
    """Within the block, the returned arguments name a folder with the model's configuration; paths stay as they are.

    Raises:
        OSError: no model has this name, or the hub cannot be reached.
    """
    name = _model_of(words)
    if not name or Path(name).exists() or ":" in name:
        yield list(words)
        return
    from transformers import AutoConfig

    trust = any(word.replace("-", "_") == "__trust_remote_code" for word in words)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / Path(name).name
        AutoConfig.from_pretrained(name, trust_remote_code=trust).save_pretrained(place)
        print(f"Memory Usage for loading `{name}`:")
        yield [str(place) if word == name else word for word in words]


def _model_of(words: Sequence[str]) -> str:
    """The model that a command line names: the first word that is neither an option nor the value of one."""
    from accel.cli.estimate import estimate_memory as command

    read = command.make_context(
        "estimate-memory", list(words), resilient_parsing=True, token_normalize_func=lambda name: name.replace("-", "_")
    )
    return next(iter(read.params.get("words") or ()), "")
