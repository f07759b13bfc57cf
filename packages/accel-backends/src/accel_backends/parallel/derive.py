"""Derivation of a tensor-parallel plan from a model's structure."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import nn

from accel_backends.parallel.matrices import Matrix, matrix_of
from accel_backends.parallel.plan import StyleChoice, TensorParallelPlan, wildcard
from accel_backends.parallel.styles import (
    STYLES,
    Colwise,
    FusedColwise,
    LocalSizes,
    PartialGradients,
    Rowwise,
    ShardedEmbedding,
    Style,
)

# Names of the projections of an attention: query, key and value, then the output.
_ATTENTION = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense")),
    (("query", "key", "value"), ("dense", "out")),
    (("q_lin", "k_lin", "v_lin"), ("out_lin",)),
    (("wq", "wk", "wv"), ("wo",)),
)
# Endings of the names of attributes that count heads.
_COUNTS = ("head", "heads")
# Names of attributes with the features of all heads, by which some attentions join their heads.
_JOINED = ("all_head_size", "embed_dim")
# Names of the layers of a feed-forward network: those that widen, then the one that narrows.
_FEED_FORWARD = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("lin1",), "lin2"),
    (("linear1",), "linear2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
# Modules of an nn.Sequential that compute each element alone.
_POINTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity, nn.LeakyReLU, nn.ELU)


def derive_plan(
    model: nn.Module, size: int, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> TensorParallelPlan:
    """Plan for a model's attentions, feed-forward networks, embedding and head, as their structure allows.

    A pair of layers is sharded where its names and sizes are those of a known block and ``size`` divides the sizes; the
    heads of an attention stay entire. Everything else is replicated. Each choice states its reason.

    Args:
        model: the model, unwrapped.
        size: number of tensor-parallel ranks.
        sequence_parallel: shard the sequence between the blocks of the list that the model repeats, so that norms
            compute on shards.
        loss_parallel: leave the logits a DTensor sharded over the vocabulary, for
            ``torch.distributed.tensor.parallel.loss_parallel``.
    """
    found: list[tuple[str, Style, str]] = []
    for name, module in model.named_modules():
        for derive in (_attention, _fused_attention, _torch_attention, _feed_forward, _sequential):
            found.extend((_joined(name, below), style, reason) for below, style, reason in derive(module, size))
    found.extend(_embedding_and_head(model, size, loss_parallel=loss_parallel))
    if sequence_parallel:
        from accel_backends.parallel.sequence import between_blocks

        found = between_blocks(model, found)
    return TensorParallelPlan(_merged(found, dict(model.named_modules())))


Found = Iterator[tuple[str, Style, str]]


def _joined(name: str, below: str) -> str:
    return ".".join(part for part in (name, below) if part)


def _merged(found: Sequence[tuple[str, Style, str]], names: Iterable[str]) -> tuple[StyleChoice, ...]:
    """One choice for all modules of a pattern, where all that the pattern matches have one style; else one for each."""
    alike: dict[str, int] = Counter(wildcard(name) for name in names)
    same: dict[tuple[str, Style], int] = Counter((wildcard(name), style) for name, style, _ in found)
    merged: dict[tuple[str, Style], StyleChoice] = {}
    for name, style, reason in found:
        pattern = wildcard(name)
        if same[pattern, style] < alike[pattern]:
            pattern = name
        merged.setdefault((pattern, style), StyleChoice(pattern, style, reason))
    return tuple(merged.values())


def _attention(module: nn.Module, size: int) -> Found:
    """Separate projections of queries, keys and values, whose heads are divided among the ranks."""
    for projections, outputs in _ATTENTION:
        matrices = _children(module, projections)
        out = next((name for name in outputs if module._modules.get(name) is not None), None)
        if matrices is None or out is None:
            continue
        output = matrix_of(module.get_submodule(out))
        query = matrices[projections[0]]
        if output is None or output.inputs != query.outputs or len({one.inputs for one in matrices.values()}) > 1:
            continue
        if reason := _undivided_heads(module, matrices, size) or _beside_heads(module, (*projections, out)):
            yield from ((name, STYLES["replicate"], reason) for name in (*projections, out))
            continue
        for name in projections:
            yield name, Colwise(), f"heads of an attention, divided over {size} ranks"
        yield out, Rowwise(), "output projection of sharded heads"
        if sizes := _head_sizes(module, matrices, query):
            yield "", LocalSizes(sizes), "the attention counts its own heads"
        yield from _head_norms(module)


def _head_sizes(module: nn.Module, matrices: Mapping[str, Matrix], query: Matrix) -> tuple[str, ...]:
    """Attributes that count the heads of the projections, by which some attentions view them (OPT), or their features.

    Attentions that join heads by an attribute (XGLM) do so because tensor parallelism makes it another than the size
    of their inputs.
    """
    head_dim = cast(int, module.head_dim)
    counts = {matrix.outputs // head_dim for matrix in matrices.values()}
    sizes = {name: value for name, value in vars(module).items() if isinstance(value, int)}
    return tuple(
        name
        for name, value in sizes.items()
        if (name.endswith(_COUNTS) and value in counts) or (name in _JOINED and value == query.outputs)
    )


def _head_norms(module: nn.Module) -> Found:
    """Norms over the features of each head, which every rank computes for its own heads."""
    for name, child in module.named_children():
        if _norms_over(child, getattr(module, "head_dim", None)):
            yield name, PartialGradients(), "norm of each head; its gradients are summed over the ranks"


def _norms_over(module: nn.Module, features: int | None) -> bool:
    """Whether a module has a weight for each of so many features, and nothing else but a bias.

    A module of several such norms, one for each head (StableLM), is none.
    """
    return _sizes(module) == {(features,)} and not any(True for _ in module.children())


def _sizes(module: nn.Module) -> set[tuple[int, ...]]:
    """Shapes of the parameters."""
    return {tuple(parameter.shape) for parameter in module.parameters()}


def _beside_heads(module: nn.Module, known: Sequence[str]) -> str | None:
    """Reason for replicating an attention that has parameters which one rank's heads may not fit."""
    others = [name for name, _ in module.named_parameters(recurse=False)]
    for name, child in module.named_children():
        if name not in known and not _norms_over(child, getattr(module, "head_dim", None)):
            others.extend(f"{name}.{below}" for below, _ in child.named_parameters())
    return f"replicated: {', '.join(others)} may be of all heads; nearest: a plan of your own" if others else None


def _undivided_heads(module: nn.Module, matrices: Mapping[str, Matrix], size: int) -> str | None:
    head_dim = getattr(module, "head_dim", None)
    for name, matrix in matrices.items():
        if not isinstance(head_dim, int) or head_dim < 1 or matrix.outputs % head_dim:
            return f"replicated: {name} has no number of heads to divide (head_dim is {head_dim!r})"
        if (heads := matrix.outputs // head_dim) % size:
            return f"replicated: {size} ranks do not divide the {heads} heads of {name}"
    return None


def _fused_attention(module: nn.Module, size: int) -> Found:
    """GPT-2's attention: queries, keys and values in one ``Conv1D``, split by the attribute ``split_size``.

    That of GPTBigCode, an ``nn.Linear``, has them side by side for each head.
    """
    matrices = _children(module, ("c_attn", "c_proj"))
    split = getattr(module, "split_size", None)
    heads = getattr(module, "num_heads", None)
    if matrices is None or not isinstance(split, int) or not isinstance(heads, int):
        return
    fused, out = matrices["c_attn"], matrices["c_proj"]
    if fused.output_dim != 1 or fused.outputs != 3 * split or out.inputs != split:
        return
    if heads % size:
        reason = f"replicated: {size} ranks do not divide {heads} heads"
        yield from ((name, STYLES["replicate"], reason) for name in ("c_attn", "c_proj"))
        return
    yield "c_attn", FusedColwise((split,) * 3), f"fused queries, keys and values, heads divided over {size} ranks"
    yield "c_proj", Rowwise(), "output projection of sharded heads"
    yield "", LocalSizes(("split_size",)), "the attention splits the fused projection of its own heads"


def _torch_attention(module: nn.Module, size: int) -> Found:
    """torch's attention computes in one function, which takes full parameters."""
    if isinstance(module, nn.MultiheadAttention):
        yield "", STYLES["replicate"], "replicated: nn.MultiheadAttention is one function of full parameters"


def _feed_forward(module: nn.Module, size: int) -> Found:
    """A feed-forward network by the names of its layers, with sizes that fit."""
    for widening, narrowing in _FEED_FORWARD:
        matrices = _children(module, (*widening, narrowing))
        if matrices is None:
            continue
        narrow, wide = matrices[narrowing], [matrices[name] for name in widening]
        if not all(one.outputs == narrow.inputs and one.inputs == narrow.outputs for one in wide):
            continue
        between = list(_between(module, (*widening, narrowing), narrow))
        if narrow.inputs % size or between:
            reason = f"replicated: {size} ranks do not divide {narrow.inputs} features"
            if between:
                reason = f"replicated: {', '.join(between)} may compute over all {narrow.inputs} features"
            yield from ((name, STYLES["replicate"], reason) for name in (*widening, narrowing))
            return
        yield from ((name, Colwise(), "widens in a feed-forward network") for name in widening)
        yield narrowing, Rowwise(), "narrows the sharded features of a feed-forward network"
        return


def _between(module: nn.Module, known: Sequence[str], narrow: Matrix) -> Iterator[str]:
    """Names of parameters and modules that may compute over the features that a feed-forward network shards.

    That is anything with parameters, for example a learnt activation (xIELU), except a norm of the network's inputs or
    outputs. A module with children counts only if each of its parameters has one value for each sharded feature.
    """
    for name, parameter in module.named_parameters(recurse=False):
        if tuple(parameter.shape) != (narrow.outputs,):
            yield name
    for name, child in module.named_children():
        sizes, leaf = _sizes(child), not any(True for _ in child.children())
        inside = sizes == {(narrow.inputs,)} or (leaf and sizes != {(narrow.outputs,)})
        if name not in known and sizes and inside:
            yield name


def _sequential(module: nn.Module, size: int) -> Found:
    """Two linear layers of an ``nn.Sequential`` with nothing but pointwise modules between them."""
    if not isinstance(module, nn.Sequential):
        return
    linear = [name for name, child in module.named_children() if matrix_of(child) is not None]
    others = [child for child in module.children() if matrix_of(child) is None]
    if len(linear) != 2 or not all(isinstance(child, _POINTWISE) for child in others):
        return
    first, second = (matrix_of(module.get_submodule(name)) for name in linear)
    if first is None or second is None or first.outputs != second.inputs or first.outputs % size:
        return
    yield linear[0], Colwise(), "first of two linear layers with pointwise modules between"
    yield linear[1], Rowwise(), "second of two linear layers"


def _embedding_and_head(model: nn.Module, size: int, *, loss_parallel: bool) -> Found:
    """Input embedding and output head, by transformers' methods for them, sharded over the vocabulary."""
    embedding, head = (_called(model, name) for name in ("get_input_embeddings", "get_output_embeddings"))
    names = {id(module): name for name, module in model.named_modules()}
    matrix = None if head is None else matrix_of(head)
    if head is None or matrix is None or id(head) not in names:
        return
    tied = embedding is not None and embedding._parameters.get("weight") is head._parameters.get("weight")
    own = {id(parameter) for parameter in head.parameters()}
    others = [
        name
        for name, module in model.named_modules()
        if module is not head
        and module is not embedding
        and any(id(parameter) in own for parameter in module.parameters(recurse=False))
    ]
    if others or matrix.outputs % size:
        reason = f"replicated: {size} ranks do not divide a vocabulary of {matrix.outputs}"
        if others:
            reason = f"replicated: {', '.join(others)} has a parameter of the head, too"
        yield names[id(head)], STYLES["replicate"], reason
        return
    yield names[id(head)], Colwise("dtensor" if loss_parallel else "full"), "head, sharded over the vocabulary"
    if isinstance(embedding, nn.Embedding) and id(embedding) in names and embedding.num_embeddings % size == 0:
        reason = "embedding, tied to the head and sharded with it" if tied else "embedding, sharded over the vocabulary"
        yield names[id(embedding)], ShardedEmbedding(), reason


def _called(model: nn.Module, method: str) -> nn.Module | None:
    found: Callable[[], Any] | None = getattr(model, method, None)
    try:
        module = found() if found is not None else None
    except NotImplementedError:
        return None
    return module if isinstance(module, nn.Module) else None


def _children(module: nn.Module, names: Sequence[str]) -> dict[str, Matrix] | None:
    """Matrices of the children with these names; None if one is missing or no matrix."""
    found: dict[str, Matrix] = {}
    for name in names:
        child = module._modules.get(name)
        matrix = None if child is None else matrix_of(child)
        if matrix is None:
            return None
        found[name] = matrix
    return found
