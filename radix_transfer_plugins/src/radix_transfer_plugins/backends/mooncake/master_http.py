"""The master's HTTP server: keys and capacity, which the client's own interface does not give."""

import http.client
import json
from typing import NamedTuple

from radix_transfer_plugins.backends.mooncake.config import Address
from radix_transfer_plugins.errors import StoreUnavailableError


class Capacity(NamedTuple):
    used_bytes: int
    capacity_bytes: int
    """0: no process contributes a segment."""


class MasterHttp:
    """Each call is one request; raises StoreUnavailableError."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s

    def stored_keys(self) -> list[str]:
        """Stored spellings of all keys, of every user of this master."""
        return self._get("/get_all_keys").splitlines()

    def num_keys(self) -> int:
        for line in self._get("/metrics").splitlines():
            name, _, value = line.partition(" ")
            if name == "master_key_count":
                return int(float(value))
        raise StoreUnavailableError(
            f"mooncake: http://{self.address}/metrics names no master_key_count; is it a master?"
        )

    def capacity(self) -> Capacity:
        try:
            segments = json.loads(self._get("/get_segments_detail"))["segments"]
            return Capacity(
                sum(int(segment["allocator_used_bytes"]) for segment in segments),
                sum(int(segment["allocator_capacity_bytes"]) for segment in segments),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise StoreUnavailableError(
                f"mooncake: http://{self.address}/get_segments_detail gave no list of segments; is it a "
                "master?"
            ) from error

    def _get(self, path: str) -> str:
        connection = http.client.HTTPConnection(self.address.host, self.address.port, timeout=self._timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise StoreUnavailableError(
                    f"mooncake: http://{self.address}{path} answered {response.status}: {body[:200]!r}"
                )
            return body.decode()
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            raise StoreUnavailableError(
                f"mooncake: the master's HTTP server at {self.address} does not answer ({error}); listing "
                "and statistics need it. Start mooncake_master with --metrics_port and give its address as "
                "metrics_server_address"
            ) from error
        finally:
            connection.close()
