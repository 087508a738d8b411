import torch

from determined.pytorch import TorchData


def rows() -> TorchData:
    return torch.zeros(4, 2)
