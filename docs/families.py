"""Small models of many families, with random weights, and what `tp` and `cp` split in each of them.

paralab plan tp --shards 2 --workload docs/families.py:llama      one family
torchrun --nproc_per_node=2 docs/families.py                      the tables in docs/strategies
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from paralab.plan.tensor_plan import table_of
from paralab.worker.proofs.prove_sequence import find_sequence_plan
from paralab.worker.proofs.prove_shards import find_tensor_plan
from paralab.worker.proofs.prove_tokens import find_token_plan
from paralab.workload.load import load_workload
from paralab.workload.sequence_plan import part_sizes
from paralab.workload.tensor_group import TensorPlan
from paralab.workload.workload import Workload, as_workload

Family = Callable[[], dict[str, Any]]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = SIZES | {"vocab_size": 64, "intermediate_size": 64, "num_key_value_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _tokens(classes: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    shape = (32, 12) if classes == 64 else (32,)
    inputs = torch.randint(3, 64, (32, 12), generator=chance)
    return inputs, torch.randint(classes, shape, generator=chance)


def _logits_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits.flatten(0, -2), target.flatten())


def _hugging_face(name: str, kind: str = "ForCausalLM", **sizes: Any) -> Family:
    def workload() -> dict[str, Any]:
        import transformers

        config = getattr(transformers, f"{name}Config")(**TOKENS, **sizes)
        model = getattr(transformers, f"{name}{kind}")
        data = _tokens(2 if kind.endswith("Classification") else 64)
        return {"model": lambda: model(config), "data": data, "loss": _logits_loss, "batch_size": 4}

    return workload


def vit() -> dict[str, Any]:
    import transformers

    config = transformers.ViTConfig(**SIZES, intermediate_size=64, image_size=16, patch_size=8)
    images = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model: Any = transformers.ViTForImageClassification
    data = (images, _tokens(2)[1])
    return {"model": lambda: model(config), "data": data, "loss": _logits_loss, "batch_size": 4}


def t5() -> dict[str, Any]:
    import transformers

    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    inputs, targets = _tokens()
    data = {"input_ids": inputs, "decoder_input_ids": targets, "target": targets}
    model: Any = transformers.T5ForConditionalGeneration

    def unpack(batch: dict[str, torch.Tensor]) -> tuple[Any, torch.Tensor]:
        return {name: batch[name] for name in list(data)[:2]}, batch["target"]

    own = {"model": lambda: model(config), "data": data, "unpack": unpack}
    return {**own, "loss": _logits_loss, "batch_size": 4}


def encoder() -> dict[str, Any]:
    def model() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)

    inputs = torch.randn(32, 6, 32, generator=torch.Generator().manual_seed(0))
    return {"model": model, "data": (inputs, inputs), "loss": nn.functional.mse_loss}


class Translator(nn.Module):
    """nn.Transformer with a causal mask, padding masks, and the samples in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.transformer = nn.Transformer(32, 4, 1, 2, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words, padding = self.embedding(tokens).transpose(0, 1), tokens < 8
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        padded = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        output = self.transformer(words, words, tgt_mask=causal, tgt_is_causal=True, **padded)
        return self.head(output.transpose(0, 1))  # type: ignore[no-any-return]


def transformer() -> dict[str, Any]:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten())

    return {"model": Translator, "data": _tokens(), "loss": loss, "batch_size": 4}


llama = _hugging_face("Llama", **{**GATED, "num_key_value_heads": 4})
llama_gqa = _hugging_face("Llama", **GATED)
mistral = _hugging_face("Mistral", **GATED)
qwen2 = _hugging_face("Qwen2", **GATED)
qwen3 = _hugging_face("Qwen3", **GATED, head_dim=8)
gemma = _hugging_face("Gemma", **GATED, head_dim=8)
phi3 = _hugging_face("Phi3", **GATED)
gpt2 = _hugging_face(
    "GPT2", "LMHeadModel", vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32
)
gpt_neox = _hugging_face("GPTNeoX", **SIZES, vocab_size=64, intermediate_size=64)
opt = _hugging_face("OPT", **SIZES, vocab_size=64, ffn_dim=64, word_embed_proj_dim=32)
bert = _hugging_face(
    "Bert", "ForSequenceClassification", **SIZES, vocab_size=64, intermediate_size=64
)
distilbert = _hugging_face(
    "DistilBert",
    "ForSequenceClassification",
    vocab_size=64,
    dim=32,
    n_layers=2,
    n_heads=4,
    hidden_dim=64,
)

FAMILIES = {
    "llama": "Llama",
    "llama_gqa": "Llama, grouped queries",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "phi3": "Phi-3",
    "gpt2": "GPT-2",
    "gpt_neox": "GPT-NeoX",
    "opt": "OPT",
    "bert": "BERT",
    "distilbert": "DistilBERT",
    "vit": "ViT",
    "t5": "T5",
    "encoder": "nn.TransformerEncoder",
    "transformer": "nn.Transformer",
    "gpt:tiny": "the built-in gpt:tiny",
    "mlp:tiny": "the built-in mlp:tiny",
}


def load_family(name: str) -> Workload:
    own = globals().get(name)
    return as_workload(own(), name) if own else load_workload(name)


@cache
def prove(name: str) -> TensorPlan:
    """Prove a family's plan on the ranks of this job."""
    plan = find_tensor_plan(load_family(name), dist.get_world_size())
    torch.set_default_dtype(torch.float32)
    assert plan.problem is None, f"{name}: {plan.problem}"
    return plan


def row_of(name: str, plan: TensorPlan) -> str:
    """Return the family's row in the table."""
    groups = f"{len(plan.kept)} of {len(plan.groups)}"
    rows = [row for row in table_of(plan) if not row.kept]
    left = [f"`{' → '.join(filter(None, (row.columns, row.row)))}`" for row in rows]
    cells = (FAMILIES[name], groups, f"{plan.share:.0%}", ", ".join(dict.fromkeys(left)) or "–")
    return f"| {' | '.join(cells)} |"


def sequence_row(name: str) -> str:
    """Return the family's row in the table of `cp`."""
    plan = find_sequence_plan(load_family(name), dist.get_world_size())
    torch.set_default_dtype(torch.float32)
    blocks = f"{len(plan.kept)} of {len(plan.blocks)}" if plan.blocks else "no blocks"
    parts = part_sizes(plan.length, plan.shards) if plan.kept else ()
    return f"| {FAMILIES[name]} | {blocks} | {' + '.join(map(str, parts)) or '–'} |"


def token_row(name: str) -> str:
    """Return the family's row in the table of `tp --sequence-parallel`."""
    plan = find_token_plan(load_family(name), prove(name))
    torch.set_default_dtype(torch.float32)
    blocks = f"{len(plan.kept)} of {len(plan.blocks)}" if plan.blocks else "no blocks"
    joined = dict.fromkeys(name for block in plan.kept for name in block.joined)
    cells = FAMILIES[name], blocks, ", ".join(f"`{each}`" for each in joined) or "–"
    return f"| {' | '.join(cells)} |"


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    dist.init_process_group("gloo")
    names = sys.argv[1:] or FAMILIES
    rows = [row_of(name, prove(name)) for name in names]
    rows += ["", *map(token_row, names), "", *map(sequence_row, names)]
    if dist.get_rank() == 0:
        print("\n".join(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
