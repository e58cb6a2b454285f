"""Train a model from another library: a small, untrained GPT-2 from Hugging Face transformers.

    pip install transformers
    paralab run ddp --replicas 2 --workload examples/huggingface.py:workload
    paralab verify all --workload examples/huggingface.py:workload

The model code is unchanged. Its embedding and output layer do not share weights
(`tie_word_embeddings=False`), because pipeline stages cannot share a parameter. paralab rejects a
model with tied weights and explains why.
"""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from paralab import Workload

VOCABULARY, LENGTH, SAMPLES = 64, 24, 512


def model() -> nn.Module:
    sizes = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=48, n_layer=4, n_head=4)
    sizes.tie_word_embeddings = False
    sizes.use_cache = False
    sizes.resid_pdrop = sizes.embd_pdrop = sizes.attn_pdrop = 0.0
    return GPT2LMHeadModel(sizes)


def loss(output: object, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss for predicting each token from the tokens before it."""
    predicted = output.logits[:, :-1]  # type: ignore[attr-defined]
    return nn.functional.cross_entropy(predicted.flatten(0, 1), tokens[:, 1:].flatten())


def workload() -> Workload:
    # Sequences that count up from a random start in steps of 1, 2, or 3.
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(VOCABULARY, (SAMPLES, 1), generator=generator)
    step = torch.randint(1, 4, (SAMPLES, 1), generator=generator)
    tokens = (start + step * torch.arange(LENGTH)) % VOCABULARY
    return Workload(
        model=model,
        data={"input": tokens, "target": tokens},
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        batch_size=32,
        data_path="generated: 512 counting sequences of 24 tokens",
    )
