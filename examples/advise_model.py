"""A small model for `adasum-hvd advise --demo examples/advise_model.py`; put in your own.

The command trains it on 1, 4 and 16 simulated workers, in at most two minutes of one process.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn


def make():
    """Return a model, a loss of its output and the targets, and pairs (input, target)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    return model, nn.CrossEntropyLoss(), (images, torch.tensor(digits.target))
