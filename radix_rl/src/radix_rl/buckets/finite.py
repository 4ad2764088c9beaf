"""`FiniteCheck`: whether weights are all finite, at the cost of a sum each and one wait for the device."""

import torch


class FiniteCheck:
    """Tensors are added as they come; `first_not_finite` names the first with a NaN or infinity in it."""

    def __init__(self) -> None:
        self._added: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Sum the tensor up; it is kept until `first_not_finite`. Tensors of integers are passed over."""
        if tensor.is_floating_point():
            # Not in half precision, whose sums overflow; dtypes of 8 bits cannot be summed at all.
            wide = tensor.float() if tensor.element_size() == 1 else tensor
            dtype = torch.promote_types(wide.dtype, torch.float32)
            self._added.append((name, tensor, wide.sum(dtype=dtype)))

    def first_not_finite(self) -> str | None:
        """The name, or None. Forgets all that was added."""
        added, self._added = self._added, []
        if not added:
            return None
        device = added[0][2].device
        sums = torch.stack([total.to(device, torch.float64) for _, _, total in added])
        for index in (~sums.isfinite()).nonzero().flatten().tolist():
            name, tensor, _ = added[index]
            # A sum of finite numbers may be infinite.
            if not bool((tensor.float() if tensor.element_size() == 1 else tensor).isfinite().all()):
                return name
        return None
