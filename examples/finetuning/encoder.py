"""A tiny transformer, and its pretraining: it learns to guess a word that is hidden in a review."""

import torch
from reviews import LENGTH, MASK, NUMBERS, WORDS, make_reviews
from torch import nn
from torch.nn.functional import cross_entropy


class TinyEncoder(nn.Module):
    """A transformer encoder for reviews.

    Args:
        width: size of the vector of each word.
        layers: number of transformer layers.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) / width**0.5)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, reviews: torch.Tensor) -> torch.Tensor:
        """Return the vectors ``(batch, LENGTH, width)`` of reviews ``(batch, LENGTH)``."""
        vectors: torch.Tensor = self.layers(self.words(reviews) + self.positions)
        return vectors


def pretrain(encoder: TinyEncoder, steps: int) -> None:
    """Train the encoder on reviews without labels; the random numbers of the process are left as they were."""
    reviews, _ = make_reviews(2000, seed=0)
    guess = nn.Linear(encoder.words.embedding_dim, len(WORDS))
    optimizer = torch.optim.Adam([*encoder.parameters(), *guess.parameters()], lr=0.003)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = reviews[torch.randint(len(reviews), (64,), generator=generator)]
        is_hidden = torch.rand(batch.shape, generator=generator) < 0.25
        guesses = guess(encoder(batch.masked_fill(is_hidden, NUMBERS[MASK])))
        loss = cross_entropy(guesses[is_hidden], batch[is_hidden])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
