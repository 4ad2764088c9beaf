"""`ViewLease`: the lease of backends whose buffers live as long as something looks at them."""

from collections.abc import Sequence

from radix_transfer_plugins.backends.base import Lease
from radix_transfer_plugins.errors import ReleasedViewError


class ViewLease(Lease):
    """Read-only memoryviews whose memory is freed when the last view of it is gone.

    `release` invalidates every view handed out. Arrays that numpy built over a view keep that view's memory
    alive until they are dropped: they stay correct, and never look at reused memory.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views: list[memoryview] | None = list(views)

    @property
    def views(self) -> Sequence[memoryview]:
        if self._views is None:
            raise ReleasedViewError(
                "these views were released; read again, or copy what must outlive the lease"
            )
        return self._views

    def release(self) -> None:
        views, self._views = self._views, None
        for view in views or ():
            try:
                view.release()
            except BufferError:  # An array is built over it; its memory goes with the array.
                continue
