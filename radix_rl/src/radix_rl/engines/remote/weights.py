"""`RemoteWeights`: weight updates of a server, ours or SGLang's own, which differ.

Our server begins, stages and commits as the engine contract says, so that the old weights stay until the end.
SGLang loads tensors into the weights in force as they come; when such an update fails, nobody can generate
there until the next one is whole, which this client sees to.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from radix_rl.buckets.bucket import TensorSpec
from radix_rl.buckets.wire import CONTENT_TYPE
from radix_rl.engines.remote.client import HttpClient
from radix_rl.errors import EngineError, EngineStateError, RequestError, WeightUpdateError


class RemoteWeights:
    def __init__(self, http: HttpClient, server_info: Mapping[str, Any]) -> None:
        self._http = http
        self.is_ours = server_info.get("server") == "radix-rl"
        self.num_ranks = 1 if self.is_ours else int(server_info.get("tp_size") or 1)
        """Members that the server has in a process group."""
        self._has_begun = False
        self._is_mixed = False

    def check(self) -> None:
        """Raises EngineStateError while the server may hold a mixture of two versions."""
        if self._is_mixed:
            raise EngineStateError(
                f"{self._http.base_url}: a weight update was broken off and left a mixture; complete another "
                "one first"
            )

    # Life of an update

    async def begin(self, version: str) -> None:
        if self.is_ours:
            await self._post("/begin_weight_update", {"weight_version": version or None})

    async def send_encoded(self, body: bytes) -> None:
        """One bucket of `encode_bucket`. Our server only."""
        try:
            await self._http.post_bytes("/update_weights_from_tensor", body, CONTENT_TYPE)
        except RequestError as error:
            raise WeightUpdateError(str(error)) from error

    async def commit(self, version: str) -> None:
        if self.is_ours:
            await self._post("/end_weight_update", {"weight_version": version})
            return
        if not self._is_mixed:
            raise EngineStateError(f"{self._http.base_url}: no tensors came since the weight update began")
        await self._end_session()
        # Nothing that the old weights computed is used again; refused while requests run or wait.
        await self._post("/flush_cache", {})
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        self._is_mixed = False

    async def abort(self) -> None:
        if self.is_ours:
            await self._post("/abort_weight_update", {})
        else:
            await self._end_session()

    async def take_over(self) -> None:
        """End the pause and the update that another client has left behind; nothing if there is none."""
        if self.is_ours:
            await self._post("/continue_generation", {"take_over": True})
            return
        await self._post("/continue_generation", {})
        with contextlib.suppress(WeightUpdateError):
            # Refused where no session is open; what one has mixed up, the next whole update mends.
            await self._post("/end_weight_update", {})

    # Ways to send tensors

    async def knows_group(self, name: str) -> bool:
        """Whether the server is still a member. SGLang does not tell; it has to be believed."""
        if not self.is_ours:
            return True
        try:
            info = await self._http.get("/server_info")
        except EngineError:
            return False
        return name in info.get("weight_update_groups", ())

    async def join_group(
        self, name: str, backend: str, *, address: str, port: int, rank_offset: int, world_size: int
    ) -> None:
        """Returns when all members have met, which the trainer's side bounds in time."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", body)

    async def leave_group(self, name: str) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": name})

    async def receive(self, specs: Sequence[TensorSpec], group_name: str) -> None:
        """Take one flattened bucket that rank 0 broadcasts meanwhile."""
        if not self.is_ours:
            if not self._has_begun:
                await self._post("/begin_weight_update", {})
                self._has_begun = True
            self._is_mixed = True
        body = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            # Once, at the commit.
            "flush_cache": False,
        }
        await self._post("/update_weights_from_distributed", body)

    async def load_checkpoint(self, path: Path, version: str) -> None:
        """Of our server, inside the update that has begun."""
        body: dict[str, Any] = {"model_path": str(path)}
        if not self.is_ours:
            self._is_mixed = True
            body |= {"weight_version": version, "flush_cache": False}
        await self._post("/update_weights_from_disk", body)

    async def _end_session(self) -> None:
        if self._has_begun:
            self._has_begun = False
            await self._post("/end_weight_update", {})

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        """A refusal is a WeightUpdateError, also where SGLang answers it with status 200."""
        try:
            answer = await self._http.post(path, body, admin=True)
        except RequestError as error:
            raise WeightUpdateError(str(error)) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise WeightUpdateError(f"{self._http.base_url}{path}: {answer.get('message')}")
