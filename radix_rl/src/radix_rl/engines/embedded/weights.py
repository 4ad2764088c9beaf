"""`WeightUpdater`: new weights arrive in buckets and take effect together at the commit, or not at all.

While an update is open, the weights in force stay untouched and new ones are staged beside them: memory for
one more copy of the model until the commit, and none afterwards. An engine whose weights were dropped has
nothing to protect, so tensors go straight into place there. Floating-point tensors are cast to the engine's
dtype, whatever they were sent in.
"""

from typing import NamedTuple

import torch

from radix_rl.buckets.bucket import WeightBucket
from radix_rl.buckets.finite import FiniteCheck
from radix_rl.errors import EngineStateError, WeightUpdateError


class _Layout(NamedTuple):
    """What a parameter's memory looks like, to make more like it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class WeightUpdater:
    """Used by the worker thread only."""

    def __init__(self, model: torch.nn.Module, version: str) -> None:
        self._model = model
        self.version: str | None = version
        """Version in force; None: there are no weights to generate with."""
        self.awake = True
        """False while the parameters' memory is given back."""
        self._layouts = {
            name: _Layout(p.shape, p.stride(), p.dtype, p.device) for name, p in model.named_parameters()
        }
        self._owner: dict[str, str] = {}
        """Every parameter name, tied ones too -> the name that owns the tensor."""
        by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._owner[name] = by_id[id(parameter)]
        saved = model.state_dict().keys()
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
        self._pending: str | None = None
        self._staged: dict[str, torch.Tensor] = {}
        """By the name that owns the tensor."""
        self._came: set[str] = set()
        self._finite = FiniteCheck()

    @property
    def pending_version(self) -> str | None:
        return self._pending

    def _in_force(self) -> str:
        return (
            "no weights are in force" if self.version is None else f"version {self.version!r} stays in force"
        )

    def begin(self, version: str) -> None:
        """Open an update. An empty `version` is one that the commit names."""
        if self._pending is not None:
            raise EngineStateError(
                f"weight update {self._pending!r} is open; commit or abort it before {version!r} begins"
            )
        if not self.awake:
            raise EngineStateError("the weights are asleep; wake(['weights']) before an update begins")
        self._pending = version

    def update(self, bucket: WeightBucket) -> None:
        """Take tensors in; the bucket's buffer may be reused afterwards.

        A refused bucket ends the whole update.
        """
        if self._pending is None:
            raise EngineStateError("update_weights needs an open update; call begin_weight_update first")
        problems: list[str] = []
        for name, tensor in bucket.tensors():
            problem = self._problem(name, tensor)
            if problem is not None:
                problems.append(problem)
            elif not problems:
                self._stage(name, tensor)
        if problems:
            pending = self._pending
            self.abort()
            raise WeightUpdateError(
                f"weight update {pending!r} refused, {self._in_force()}: {_listed(problems, '; ')}"
            )

    def _problem(self, name: str, tensor: torch.Tensor) -> str | None:
        owner = self._owner.get(name)
        if owner is None and name not in self._buffers:
            return f"{name!r} is no weight of the model"
        if owner is not None:
            shape, _, dtype, device = self._layouts[owner]
        else:
            shape, dtype, device = (
                self._buffers[name].shape,
                self._buffers[name].dtype,
                self._buffers[name].device,
            )
        if tensor.shape != shape:
            return f"{name!r}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}"
        if tensor.dtype != dtype and not (tensor.dtype.is_floating_point and dtype.is_floating_point):
            return f"{name!r}: expected dtype {dtype}, got {tensor.dtype}"
        if name in self._came:
            return f"{name!r} comes twice"
        staged = self._staged.get(owner or name)
        if staged is not None and not torch.equal(staged, tensor.to(device, dtype)):
            tied = sorted(other for other in self._came if self._owner.get(other) == owner)
            return f"{name!r} differs from {', '.join(map(repr, tied))}, to which it is tied"
        return None

    def _stage(self, name: str, tensor: torch.Tensor) -> None:
        self._came.add(name)
        owner = self._owner.get(name)
        if owner is None:
            self._staged[name] = tensor.to(self._buffers[name].device, self._buffers[name].dtype, copy=True)
        elif owner not in self._staged:
            staged = self._layouts[owner].empty().copy_(tensor)
            if self.version is None:
                self._model.get_parameter(owner).data = staged
            self._staged[owner] = staged
            # As cast: what was finite may be too large for the engine's dtype.
            self._finite.add(name, staged)

    def check_complete(self, version: str) -> None:
        """Refuse an update that is incomplete, not finite or not the one begun.

        Raises WeightUpdateError, which ends the update.
        """
        if self._pending is None:
            raise EngineStateError(
                "commit_weight_update needs an open update; call begin_weight_update first"
            )
        missing = sorted(set(self._layouts) - set(self._staged))
        not_finite = self._finite.first_not_finite()
        if version and self._pending in (version, "") and not missing and not_finite is None:
            return
        pending = self._pending
        self.abort()
        if missing:
            raise WeightUpdateError(
                f"weight update {pending!r} refused, {self._in_force()}: missing {_listed(missing, ', ')}"
            )
        if not_finite is not None:
            raise WeightUpdateError(
                f"weight update {pending!r} refused, {self._in_force()}: {not_finite!r} has values that are "
                "not finite (NaN or infinity)"
            )
        raise WeightUpdateError(
            f"commit of version {version!r} refused, {self._in_force()}: the update was begun as {pending!r}"
        )

    def commit(self, version: str) -> None:
        self.check_complete(version)
        for name, staged in self._staged.items():
            if name in self._buffers:
                self._buffers[name].copy_(staged)
            else:
                self._model.get_parameter(name).data = staged
        self.abort()
        self.version = version

    def abort(self) -> None:
        """Drop an open update. Idempotent."""
        self._staged, self._came, self._finite = {}, set(), FiniteCheck()
        self._pending = None

    def sleep(self) -> None:
        """Give the parameters' memory back. Buffers stay: no update brings those back that are not saved."""
        if not self.awake:
            return
        self.abort()
        for parameter in self._model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self.awake = False
        self.version = None

    def wake(self) -> None:
        """Take the memory again. Its contents mean nothing until the next commit."""
        if self.awake:
            return
        # All or none.
        memory = {name: layout.empty().zero_() for name, layout in self._layouts.items()}
        for name, tensor in memory.items():
            self._model.get_parameter(name).data = tensor
        self.awake = True


def _listed(parts: list[str], separator: str) -> str:
    """The first 20: a model has thousands of tensors."""
    return separator.join(parts[:20]) + (f" and {len(parts) - 20} more" if len(parts) > 20 else "")
