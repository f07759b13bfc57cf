"""Shape of a decoder-only transformer with gated feed-forward layers: sizes from a configuration, without a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from accel_state.errors import ConfigError

_DENSE = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_MIXTURES = frozenset({"mixtral", "qwen3_moe"})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """Sizes of a model of equal blocks: attention, and one gated feed-forward layer or several experts.

    Attributes:
        name: shown in tables.
        hidden: width of a token between blocks.
        feed_forward: inner width of the feed-forward layer, or of one expert.
        layers: number of blocks.
        heads: attention heads.
        groups: heads of keys and values.
        head_size: width of a head.
        vocabulary: number of tokens.
        experts: experts of a block; 0: one feed-forward layer.
        chosen: experts that compute a token.
        tied: the head is the embedding.
    """

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    groups: int
    head_size: int
    vocabulary: int
    experts: int = 0
    chosen: int = 0
    tied: bool = False
    name: str = "transformer"

    def __post_init__(self) -> None:
        for field in ("hidden", "feed_forward", "layers", "heads", "groups", "head_size", "vocabulary"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} is {getattr(self, field)}; expected at least 1")
        if self.heads % self.groups:
            raise ConfigError(f"heads={self.heads} is no multiple of groups={self.groups}")
        if self.experts and not 1 <= self.chosen <= self.experts:
            raise ConfigError(f"chosen={self.chosen} of experts={self.experts}; expected 1 to {self.experts}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "TransformerShape":
        """Reads the fields of a ``config.json`` of transformers.

        Raises:
            ConfigError: the type of model is another one, a field is missing or no number of at least 1, or blocks are
                unequal.
        """
        kind = config.get("model_type")
        if kind not in _DENSE | _MIXTURES:
            known = ", ".join(sorted(_DENSE | _MIXTURES))
            raise ConfigError(f"model_type {kind!r} has blocks that are not described here; described are: {known}")
        if config.get("mlp_only_layers"):
            raise ConfigError(
                f"mlp_only_layers is {config['mlp_only_layers']}; only models of equal blocks are described"
            )
        if config.get("decoder_sparse_step") not in (None, 1):
            raise ConfigError(
                f"decoder_sparse_step is {config['decoder_sparse_step']}; only models of equal blocks are described"
            )

        def size(*names: str, default: int | None = None) -> int:
            """The first of the fields that is given."""
            for name in names:
                if config.get(name) is not None:
                    return _count(name, config[name])
            if default is None:
                raise ConfigError(f"the configuration of a {kind} has no {names[-1]}")
            return default

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        experts = size("num_local_experts", "num_experts") if kind in _MIXTURES else 0
        return cls(
            name=str(kind),
            hidden=hidden,
            feed_forward=size(*["moe_intermediate_size"] * bool(experts), "intermediate_size"),
            layers=size("num_hidden_layers"),
            heads=heads,
            groups=size("num_key_value_heads", default=heads),
            head_size=size("head_dim", default=hidden // heads),
            vocabulary=size("vocab_size"),
            experts=experts,
            chosen=size("num_experts_per_tok") if experts else 0,
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def queries(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.groups * self.head_size

    @property
    def attention(self) -> int:
        """Elements of the attention's matrices of a block."""
        return 2 * self.hidden * (self.queries + self.keys)

    @property
    def feed_forwards(self) -> int:
        """Elements of the feed-forward layer of a block, or of all its experts."""
        return 3 * self.hidden * self.feed_forward * max(1, self.experts)

    @property
    def block(self) -> int:
        """Elements of a block, with its two norms and the router of its experts."""
        return self.attention + self.feed_forwards + 2 * self.hidden + self.hidden * self.experts

    @property
    def ends(self) -> int:
        """Elements outside the blocks: embedding, head, last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return self.layers * self.block + self.ends

    def flops(self, sequences: int, length: int, *, copies: int = 1) -> int:
        """Floating-point operations of forward and backward: six for each element and token, and attention.

        ``copies``: ranks that compute the same experts for the same tokens.
        """
        used = self.attention + 3 * self.hidden * self.feed_forward * max(1, self.chosen) * copies
        products = 6 * (self.layers * used + self.vocabulary * self.hidden) * sequences * length
        return products + 6 * self.layers * self.queries * sequences * length**2  # causal: half of the pairs


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1")
    return value
