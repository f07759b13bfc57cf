"""Sequence parallelism for models of Transformers, with DeepSpeed's ``UlyssesSPAttentionHF``."""

import sys
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from accel_state.errors import BackendError, ConfigError, PrepareError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_WHOLE = "full_attention"


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is one of Transformers'; does not import Transformers."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


@final
class SharedAttention:
    """Sequence-parallel attention of one prepared Transformers model; ``release`` restores the model's own.

    The attention is registered with Transformers under a new name, which the model's config selects. It receives no
    mask: every token attends to itself and earlier tokens.

    Args:
        attention: attention function of Transformers to use; None: the model's own.

    Raises:
        ConfigError: an attention function that does not exist, or needs a mask.
        PrepareError: layers with another kind of attention, or a number of heads that is not divisible.
    """

    def __init__(self, model: Any, group: "ProcessGroup", attention: str | None) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self._config, self._before = model.config, model.config._attn_implementation
        self._core = attention or self._before
        if self._core not in ("eager", *ALL_ATTENTION_FUNCTIONS):
            raise ConfigError(
                f"attention {self._core!r} is not among those that Transformers has loaded: "
                f"{', '.join(ALL_ATTENTION_FUNCTIONS)}; build the model with attn_implementation={self._core!r} first"
            )
        if "eager" in self._core:
            raise ConfigError(
                f"attention {self._core!r} of this {type(model).__name__} cannot go without a mask over whole "
                "sequences; nearest: sp_attn_implementation='sdpa'"
            )
        self._heads, self._group = _heads(model, group.size()), group
        self._compute = ALL_ATTENTION_FUNCTIONS[self._core]
        self._by_batch: dict[int, Any] = {}
        self.name = f"shared_{self._core}_{id(self)}".replace("/", "_")
        ALL_ATTENTION_FUNCTIONS[self.name] = self._attend
        self._config._attn_implementation = self.name
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def release(self) -> None:
        """Restores the model's own attention."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self._hook.remove()
        self._config._attn_implementation = self._before
        del ALL_ATTENTION_FUNCTIONS[self.name]

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Attention in Transformers' form (samples, heads, tokens, head size).

        Keeps one DeepSpeed object for each number of samples, which is fixed in its constructor.
        """
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        samples = len(query)
        if samples not in self._by_batch:
            self._by_batch[samples] = UlyssesSPAttentionHF(
                self._compute, samples, **self._heads, process_group=self._group, seq_length_is_variable=True
            )
        return self._by_batch[samples](module, query, key, value, None, *args, **kwargs)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Passes shifted labels to the model's loss, and validates position ids; forward pre-hook."""
        places = kwargs.get("position_ids")
        if places is None:
            raise BackendError(
                f"{type(module).__name__} got no position_ids, and has a part of each sequence; call model(**batch), "
                "where a prepared loader puts them"
            )
        if self._core == "sdpa" and not self._counts_through(places):
            raise BackendError(
                "position_ids that do not count through the sequence: 'sdpa' does not keep packed samples apart; "
                "nearest: sp_attn_implementation='flash_attention_2'"
            )
        if kwargs.get("labels") is None and kwargs.get("shift_labels") is not None:
            kwargs["labels"] = kwargs["shift_labels"]
        return args, kwargs

    def _counts_through(self, places: torch.Tensor) -> bool:
        """Whether positions ascend by one through the parts of all ranks, from any position; the same on every rank.

        Collective: every rank of the group must call this.
        """
        import torch.distributed as dist

        length = places.shape[1]
        steps = torch.arange(length, device=places.device)
        ascend = (places - places[:, :1] == steps).all()
        begins = places[:, 0] - self._group.rank() * length  # where rank 0's part would begin
        mine = torch.cat([begins, ascend[None].to(begins.dtype)])
        parts = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(parts, mine, group=self._group)
        return bool(torch.stack([(part[:-1] == parts[0][:-1]).all() & (part[-1] == 1) for part in parts]).all())


def _heads(model: Any, ranks: int) -> dict[str, int]:
    """Returns number and size of the heads.

    Raises:
        PrepareError: layers or heads that cannot be used with sequence parallelism.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {_WHOLE}
    if not hasattr(config, "layer_types") and getattr(config, "sliding_window", None):
        kinds = {"sliding_window"}
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        kinds = {"attention to later tokens"}  # attention to padding too, which only a mask could hide
    if kinds:
        raise PrepareError(
            f"{type(model).__name__} has layers of {', '.join(sorted(kinds))}, which would see a rank's part of a "
            f"sequence only; sequences can be shared where all layers are {_WHOLE}"
        )
    heads, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    keys = heads if keys is None else keys
    if heads % ranks or (keys % ranks and ranks % keys):
        raise PrepareError(
            f"{type(model).__name__} has {heads} heads and {keys} of keys, which do not divide among {ranks} ranks; "
            "nearest: a sequence_parallel_size that divides them"
        )
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "attn_head_count": heads,
        "attn_head_size": size,
        "kv_head_count": keys,
        "num_hidden_layers": config.num_hidden_layers,
    }
