"""Configuration of the mooncake backend."""

from collections.abc import Mapping

import msgspec

from radix_transfer_plugins.backends.config import DEFAULT_KEY_PREFIX, parse_config
from radix_transfer_plugins.errors import ConfigError
from radix_transfer_plugins.keys import check_prefix
from radix_transfer_plugins.sizes import parse_bytes, parse_seconds

DEFAULT_METRICS_PORT = 9003


class MooncakeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user writes: the client's own set-up options by their own names, and ours below them."""

    master_server_address: str | None = None
    """host:port of mooncake_master, such as "10.0.0.1:50051"; required."""
    master_server_addr: str | None = None
    """The client's own spelling of the same."""
    local_hostname: str | None = None
    """This machine as others reach it; default: the address that reaches the master."""
    metadata_server: str = "P2PHANDSHAKE"
    global_segment_size: int | str = 0
    """Memory this process contributes to the store; 0: a pure client. Some process must contribute."""
    local_buffer_size: int | str = "256mb"
    """Memory through which this process puts, and in which the views of its reads live."""
    protocol: str = "tcp"
    rdma_devices: str = ""
    ipc_socket_path: str = ""
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300

    key_prefix: str = DEFAULT_KEY_PREFIX
    metrics_server_address: str | None = None
    """host:port of the master's HTTP server, for listing and statistics; default: the master's host, port
    9003.
    """
    wait_s: float | str = 30.0
    """How long a put waits for room in the segments before it raises StoreFullError."""
    timeout_s: float | str = 10.0
    """How long a call waits for a master that does not answer before it raises StoreUnavailableError."""


class Address(msgspec.Struct, frozen=True):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class MooncakeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The options, checked and in their units."""

    master: Address
    metrics: Address
    local_hostname: str | None
    local_buffer_bytes: int
    setup: dict[str, object]
    """For the client's `setup`, all but the addresses of the master and of this machine."""
    key_prefix: str
    wait_s: float
    timeout_s: float

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> "MooncakeConfig":
        """Raises ConfigError naming the known options."""
        options = parse_config(config, MooncakeOptions, "mooncake")
        spellings = (options.master_server_address, options.master_server_addr)
        given = [text for text in spellings if text is not None]
        if len(given) != 1:
            raise ConfigError(
                'backend \'mooncake\': give the master once, as "master_server_address": "host:port", got '
                f"{given!r}; start one with `mooncake_master --rpc_port=50051`"
            )
        master = parse_address(given[0], "master_server_address")
        metrics = options.metrics_server_address
        local_buffer_bytes = parse_bytes(options.local_buffer_size, "local_buffer_size")
        if local_buffer_bytes == 0:
            raise ConfigError(
                'local_buffer_size: expected more than 0, such as "256mb": every put goes through it'
            )
        setup: dict[str, object] = {
            "metadata_server": options.metadata_server,
            "global_segment_size": parse_bytes(options.global_segment_size, "global_segment_size"),
            "local_buffer_size": local_buffer_bytes,
            "protocol": options.protocol,
            "rdma_devices": options.rdma_devices,
            "tenant_id": options.tenant_id,
            "enable_ssd_offload": options.enable_ssd_offload,
            "enable_client_http_server": options.enable_client_http_server,
            "client_http_port": options.client_http_port,
        }
        setup |= {
            name: value
            for name, value in (
                ("ipc_socket_path", options.ipc_socket_path),
                ("ssd_offload_path", options.ssd_offload_path),
            )
            if value
        }
        return cls(
            master=master,
            metrics=Address(master.host, DEFAULT_METRICS_PORT)
            if metrics is None
            else parse_address(metrics, "metrics_server_address"),
            local_hostname=options.local_hostname,
            local_buffer_bytes=local_buffer_bytes,
            setup=setup,
            key_prefix=check_prefix(options.key_prefix),
            wait_s=parse_seconds(options.wait_s, "wait_s"),
            timeout_s=_timeout(options.timeout_s),
        )


def _timeout(value: float | str) -> float:
    timeout_s = parse_seconds(value, "timeout_s")
    if not 0.01 <= timeout_s <= 3600:
        raise ConfigError(f"timeout_s: expected 0.01 to 3600 seconds, got {value!r}")
    return timeout_s


def parse_address(text: str, name: str) -> Address:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f'{name}: expected host:port such as "10.0.0.1:50051", got {text!r}')
    return Address(host, int(port))
