import os

import torch

from determined.pytorch import DataLoader

ROWS = int(os.environ.get("HOUSES", "16"))


def houses(seed):
    """Prices that depend on three numbers of each house."""
    numbers = torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(seed))
    return list(zip(numbers, numbers @ torch.tensor([3.0, 1.0, 2.0])))


def loader(seed, batch_size):
    return DataLoader(houses(seed), batch_size=batch_size)
