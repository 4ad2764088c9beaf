"""`Ranks`: what a worker needs of the other ranks. One rank needs nothing, and is the default."""

import torch
import torch.distributed as dist


class Ranks:
    """A trainer of one process."""

    index = 0
    size = 1

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over ranks; every rank passes the same names in the same order."""
        return values

    def max(self, values: dict[str, float]) -> dict[str, float]:
        return values


class ProcessRanks(Ranks):
    """The ranks of torch.distributed's default group, which must be initialised."""

    def __init__(self) -> None:
        self.index = dist.get_rank()
        self.size = dist.get_world_size()

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: dict[str, float]) -> dict[str, float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: dict[str, float], operation: dist.ReduceOp.RedOpType) -> dict[str, float]:
        tensor = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        return dict(zip(values, tensor.tolist(), strict=True))
