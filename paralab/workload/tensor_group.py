"""The plain numbers of tensor parallelism: a model's linear layers and embeddings, and the groups to
shard."""

from __future__ import annotations

from dataclasses import dataclass

from paralab.workload.sequence_plan import SequencePlan


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer, as observed in one forward pass.

    reads       the linear layers whose outputs reach the input without another layer in between
    parameters  the number of elements of the weight and bias
    shared      whether other code also uses the parameters (tied weights)
    heads       the number of heads of an nn.MultiheadAttention, which is a group by itself
    transposed  whether the layer is Hugging Face's Conv1D, which stores its weight transposed
    """

    name: str
    inputs: int
    outputs: int
    parameters: int
    reads: tuple[str, ...] = ()
    shared: bool = False
    transposed: bool = False
    heads: int = 0


@dataclass(frozen=True)
class WordTable:
    """An nn.Embedding, as observed in one forward pass.

    heads    linear layers that use the same weight (tied weights)
    tables   other embeddings that use the same weight
    tied     other parameter paths of the weight
    problem  why its rows cannot be split; empty if they can
    """

    name: str
    words: int
    parameters: int
    heads: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class TensorGroup:
    """Linear layers that are sharded together. Each shard has some of the columns' outputs and the
    matching rows of the layer that reads these outputs.

    A group with `words` is an embedding (its row), a head (its column), or both if they are tied.
    Each shard has some of the words.

    block       the submodule on which the group is proved
    columns     the layers whose outputs are split
    row         the layer that reads the outputs; its results are summed over the shards. An
                nn.MultiheadAttention is both the only column and the row
    weights     the number of parameters that are split
    parts       the number of matrices side by side in a column layer: 3 for q, k, and v
    divided     integer attributes that are divided by the number of shards, with the new values
    summed      parameters that are not split, but whose gradients must be summed over the shards
    words       the number of words that an embedding or a head splits; 0 in other groups
    more_rows   other embeddings with the row's weight
    tied        other parameter paths of the row's weight
    split_loss  whether the loss reads a head's split logits; otherwise, the shards gather them
    own_style   whether `MatrixParallel` splits all layers instead of torch's styles, because of a
                Conv1D or because the model changes outputs in place
    kept        whether the proof passed on all ranks
    error       the largest difference between the sharded and the plain block, relative to the
                largest value; None if either block failed
    reason      why the group is not kept
    """

    block: str
    columns: tuple[str, ...]
    row: str
    weights: int
    parts: int = 1
    divided: tuple[tuple[str, int], ...] = ()
    summed: tuple[str, ...] = ()
    words: int = 0
    more_rows: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    split_loss: bool = False
    own_style: bool = False
    kept: bool = False
    error: float | None = None
    reason: str = ""

    @property
    def is_attention(self) -> bool:
        return self.columns == (self.row,)

    @property
    def in_pieces(self) -> bool:
        """Whether each shard of a column layer consists of several pieces."""
        return self.is_attention or self.parts > 1

    @property
    def layers(self) -> tuple[str, ...]:
        names = (*self.columns, self.row, *self.more_rows)
        return tuple(dict.fromkeys(filter(None, names)))

    def style_of(self, layer: str) -> str:
        """Return the layer's style for `parallelize_module`, as a Python expression."""
        if self.is_attention:
            return "MultiheadParallel()"
        if self.words and layer not in self.columns:
            return "EmbeddingParallel()"
        if self.words:
            logits = "use_local_output=False" if self.split_loss else "output_layouts=Replicate()"
            return f"ColwiseParallel({logits})"
        if layer == self.row:
            return "MatrixParallel(rows=True)" if self.own_style else "RowwiseParallel()"
        plain = self.parts == 1 and not self.own_style
        return "ColwiseParallel()" if plain else f"MatrixParallel({self.parts})"


@dataclass(frozen=True)
class TensorPlan:
    """The groups of a model for a number of shards. If they cannot be used, `problem` says why.

    left      other linear layers and embeddings, and the reasons why they are in no group
    sequence  the blocks that split the sequence between the groups; None if not requested
    """

    shards: int
    groups: tuple[TensorGroup, ...]
    left: tuple[tuple[str, str], ...] = ()
    parameters: int = 0
    problem: str | None = None
    sequence: SequencePlan | None = None

    @property
    def kept(self) -> tuple[TensorGroup, ...]:
        return tuple(group for group in self.groups if group.kept)

    @property
    def splits_loss(self) -> bool:
        return any(group.split_loss for group in self.kept)

    @property
    def share(self) -> float:
        """The share of the model's parameters that are split."""
        return sum(group.weights for group in self.kept) / (self.parameters or 1)
