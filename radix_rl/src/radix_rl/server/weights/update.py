"""`WeightUpdate`: the one weight update that a server may have open."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from radix_rl.buckets.bucket import WeightBucket
from radix_rl.engines.base import Engine
from radix_rl.errors import EngineStateError, RequestError, WeightUpdateError


class WeightUpdate:
    """Begin, tensors, commit, as the engine has them, and the version's name.

    A client gives the name at the beginning, with the tensors, or not at all.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_open = False
        self._number = 0
        self._begun_as: str | None = None
        self._named: str | None = None
        self._given_up = ""
        self.receiving = asyncio.Lock()
        """Held from the arrival of tensors until the engine has them, so that a commit waits for them."""

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def number(self) -> int | None:
        """Of the open update, unlike that of any other; None: there is none."""
        return self._number if self._is_open else None

    def check_closed(self) -> None:
        if self._is_open:
            called = f"to version {self._begun_as!r} " if self._begun_as is not None else ""
            raise EngineStateError(f"an update {called}has begun; end it or call /abort_weight_update first")

    def check_open(self) -> None:
        if not self._is_open:
            raise EngineStateError(
                "no weight update has begun; call /begin_weight_update first (/abort_weight_update and a "
                "refused tensor end one)"
            )

    async def begin(self, version: str | None) -> int:
        """Its number.

        No version, or an empty one: `name` or nobody names it. EngineStateError while one is open.
        """
        self.check_closed()
        self._is_open, self._begun_as, self._named = True, version or None, None
        self._number += 1
        number = self._number
        try:
            # Without a name the engine takes the one of the commit.
            await self._engine.begin_weight_update(version or "")
        except BaseException:
            self._close(number)
            raise
        return number

    def name(self, version: str | None) -> None:
        """What a client calls the version later on."""
        if not version:
            return
        if self._begun_as is not None and version != self._begun_as:
            raise RequestError(
                f"weight_version: expected {self._begun_as!r}, which was begun, got {version!r}"
            )
        self._named = version

    async def add(self, bucket: WeightBucket, number: int | None) -> None:
        """`number`: of the update that was open when the tensors began to come.

        EngineStateError if it is not any more: they must not get into another one.
        """
        if number is None or self.number != number:
            raise EngineStateError("the weight update was dropped, or another begun, while its tensors came")
        try:
            await self._engine.update_weights(bucket)
        except WeightUpdateError:
            # An engine that refuses a bucket has ended the whole update.
            self._close(number)
            raise

    async def commit(self) -> str:
        """The version in force from now on; without any name it is called as the one before.

        After EngineStateError, such as for requests that run, the update is still open and can be committed
        later.
        """
        before = (await self._engine.info()).weight_version or self._given_up
        self.check_open()
        number, version = self._number, self._begun_as or self._named or before
        try:
            await self._engine.commit_weight_update(version)
        except EngineStateError:
            raise
        except BaseException:
            await self.abort(number)
            raise
        self._close(number)
        return version

    async def abort(self, number: int | None = None) -> None:
        """Drop it, if there is one, or, with `number`, if it is that one."""
        if number is not None and self.number != number:
            return
        self._is_open = False
        await self._engine.abort_weight_update()

    def dropped(self, version: str) -> None:
        """The engine has given its weights up, and with them the update.

        `version` was in force; an empty one if none was.
        """
        self._is_open = False
        self._given_up = version or self._given_up

    def _close(self, number: int) -> None:
        """Another one may be open by now, which stays."""
        if self._number == number:
            self._is_open = False

    @contextlib.asynccontextmanager
    async def at_once(
        self, version: str | None, *, abort_requests: bool, keep_pause: bool
    ) -> AsyncIterator[int]:
        """A whole update around `add`s; gives its number.

        It is begun and committed while the engine is paused, for clients that do not do it themselves.
        Requests that run are computed again under the new weights, or end with the tokens they have.
        """
        self.check_closed()
        async with _paused(self._engine, abort=abort_requests, keep=keep_pause):
            number = await self.begin(version)
            try:
                yield number
                await self.commit()
            except BaseException:
                await self.abort(number)
                raise


@contextlib.asynccontextmanager
async def _paused(engine: Engine, *, abort: bool, keep: bool) -> AsyncIterator[None]:
    """A pause that was there before stays; one of our own does not outlive a failure."""
    try:
        await engine.pause("abort" if abort else "retract")
    except EngineStateError:
        if abort:
            await engine.abort()
        yield
        return
    try:
        yield
    except BaseException:
        await engine.resume()
        raise
    if not keep:
        await engine.resume()
