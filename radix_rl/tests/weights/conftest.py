"""Weights to send."""

import pytest
import torch


@pytest.fixture
def named_tensors() -> list[tuple[str, torch.Tensor]]:
    """Five tensors of several dtypes and shapes, 84 bytes in all."""
    return [
        ("a", torch.arange(6, dtype=torch.float32).view(2, 3)),
        ("b", torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16)),
        ("c", torch.tensor(7, dtype=torch.int64)),
        ("d", torch.arange(10, dtype=torch.float32).view(5, 2).t()),
        ("empty", torch.zeros(0, 3)),
    ]
