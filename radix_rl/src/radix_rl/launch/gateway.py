"""One address in front of several inference servers: an HAProxy and the configuration it needs.

Routers that parse requests drop fields they do not know, `return_outputs_via_store` among them. HAProxy
forwards bodies and answers as they are. It picks the server with the fewest connections, keeps requests of
one session (a header) on one server, and sends a generation whose server died before answering to another
one.

Each server's /health decides where new requests go, and no more than that: SGLang's fails on a server that
is paused or long at one prefill. Running requests stay; while no server is healthy, as when all are paused
for new weights, requests go to any of them and wait there.
"""

import contextlib
import ctypes
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from radix_rl.addresses import host_and_port
from radix_rl.config.urls import check_base_url
from radix_rl.errors import ConfigurationError

HEALTHY, ANY = "engines", "engines-any"
"""HAProxy backends: the same servers with health checks and without, for when none is healthy."""
START_TIMEOUT_S = 30.0
INSTALL_COMMAND = "sudo apt-get install haproxy"
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_HEADER = re.compile(r"[A-Za-z0-9-]+")

_TEMPLATE = """\
global
    maxconn {max_connections}
    # A request that fits into one buffer can be sent again to another server.
    tune.bufsize {max_retried_bytes}
    stats socket {admin_socket} mode 600 level admin
    hard-stop-after {drain_s}s

    # A second gateway on this port would silently take half of the requests.
    noreuseport

defaults
    mode http
    timeout connect 5s
    # Of the head of a request, and of a body up to what one buffer holds.
    timeout http-request {request_timeout_s}s
    timeout http-keep-alive 60s
    timeout client {timeout_s}s
    timeout server {timeout_s}s
    timeout check 5s
    balance leastconn
    # A client that leaves is passed on at once, so that its request is aborted and its outputs are deleted.
    option abortonclose
    option http-no-delay
    option http-buffer-request
    option redispatch 1
    retries 3
    retry-on conn-failure empty-response
    # A host that is gone for 30 s is a connection that broke; a server that died breaks it itself. The checks
    # break none: a request that HAProxy is about to send elsewhere would end with them.
    option srvtcpka
    default-server tcp-ut 30s

frontend gateway
    bind {bind}
    use_backend {any} if {{ nbsrv({healthy}) eq 0 }}
    default_backend {healthy}

backend {healthy}
    option httpchk GET /health
    http-check expect status 200
    default-server check inter 1s fall 2 rise 1
    stick-table type string len 256 size 1m expire {timeout_s}s
{servers}

backend {any}
{servers}
"""

_RULES = """\
    stick on req.hdr({session_header}) table {healthy}
    # Only generations are repeated; to repeat a weight update or a pause would not be the same as once.
    acl generation path /generate /v1/completions /v1/chat/completions /inference/v1/generate
    http-request disable-l7-retry unless generation"""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Raises ConfigurationError for what HAProxy would misread."""

    urls: Sequence[str]
    """`http://host:port` of each server."""
    host: str = "127.0.0.1"
    port: int = 8000
    session_header: str = "X-Session-Id"
    timeout_s: int = 3600
    """The longest silence of a generation; also how long a session is remembered."""
    request_timeout_s: int = 60
    """How long a client may take to send a request; then a 408."""
    drain_s: int = 600
    """How long a stopping gateway lets running requests end."""
    max_connections: int = 4096
    max_retried_bytes: int = 1 << 20
    """Longer requests are passed on, but not repeated when their server dies."""
    addresses: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.urls:
            raise ConfigurationError(
                "gateway: expected at least one server URL, such as http://10.0.0.1:30000"
            )
        if len(set(self.urls)) != len(self.urls):
            raise ConfigurationError(f"gateway: a server is named twice: {list(self.urls)!r}")
        if not _HEADER.fullmatch(self.session_header):
            raise ConfigurationError(f"gateway: expected a header name, got {self.session_header!r}")
        object.__setattr__(self, "addresses", tuple(_address(url) for url in self.urls))


def _address(url: str) -> str:
    """`host:port` of a server. Raises ConfigurationError."""
    try:
        parts = urlsplit(check_base_url(url))
    except ValueError as error:
        raise ConfigurationError(f"gateway: expected http://host:port; {error}") from error
    host = parts.hostname or ""
    known = re.fullmatch(r"[A-Za-z0-9.:_-]+", host)
    if parts.scheme != "http" or parts.port is None or parts.path or not known:
        raise ConfigurationError(f"gateway: expected http://host:port, got {url!r}")
    return host_and_port(host, parts.port)


def render(settings: GatewaySettings, admin_socket: Path) -> str:
    """The configuration file."""
    servers = [f"    server s{i} {address}" for i, address in enumerate(settings.addresses)]
    return _TEMPLATE.format(
        max_connections=settings.max_connections,
        max_retried_bytes=settings.max_retried_bytes,
        admin_socket=admin_socket,
        drain_s=settings.drain_s,
        timeout_s=settings.timeout_s,
        request_timeout_s=settings.request_timeout_s,
        bind=host_and_port(settings.host, settings.port),
        healthy=HEALTHY,
        any=ANY,
        servers="\n".join([_RULES.format(healthy=HEALTHY, session_header=settings.session_header), *servers]),
    )


def _drain_with_parent() -> None:
    """Linux: the signal that HAProxy drains at comes with its parent's end."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)


def _remove_after(pid: int, folder: str) -> "subprocess.Popen[bytes]":
    """A process that removes the folder when process `pid` has ended, also if ours was killed before."""
    command = 'tail -s 0.1 --pid="$0" -f /dev/null; rm -rf "$1"'
    return subprocess.Popen(
        ["sh", "-c", command, str(pid), folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def find_haproxy() -> str:
    """Debian puts it where only root's PATH leads.

    Raises ConfigurationError with the command that installs it.
    """
    path = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if path is None:
        raise ConfigurationError(f"gateway: haproxy is not installed; run: {INSTALL_COMMAND}")
    return path


def require_output_store(urls: Sequence[str], timeout_s: float = 10.0) -> None:
    """Ask every server itself: through a gateway a client sees only one of them.

    Raises ConfigurationError.
    """
    for url in urls:
        try:
            answer = httpx.get(f"{url.rstrip('/')}/server_info", timeout=timeout_s)
            # Stock vLLM has no such route.
            info = {} if answer.status_code == 404 else answer.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise ConfigurationError(f"gateway: {url}/server_info does not answer: {error}") from error
        if not info.get("output_store"):
            raise ConfigurationError(
                f"gateway: {url} has no output store and would ignore return_outputs_via_store; start it "
                "with --output-store-backend, vLLM with output_store in --additional-config, and with "
                "radix-engine-plugins installed beside it: SGLang's log says if that was refused, vLLM "
                "skips it in silence unless VLLM_PLUGINS names radix_output_store"
            )


def require_keys(settings: GatewaySettings, timeout_s: float = 10.0) -> None:
    """Refuse a server that answers without a key.

    Behind the gateway's address its control routes would be open to whoever reaches that. Raises
    ConfigurationError.
    """
    for url in settings.urls:
        remedy = (
            f"start it with --api-key, or say --allow-unauthenticated to listen at {settings.host!r} all the "
            "same"
        )
        try:
            status = httpx.get(f"{url}/server_info", timeout=timeout_s).status_code
        except httpx.HTTPError as error:
            raise ConfigurationError(
                f"gateway: {url} does not tell whether it asks for a key ({error}); {remedy}"
            ) from error
        if status not in (401, 403):
            raise ConfigurationError(f"gateway: {url} answers without a key; {remedy}")


class Gateway:
    """A running HAProxy; owns the process and the folder of its files.

    `stop` may be called in a `finally`. When the thread that made it ends without that, or is killed, HAProxy
    lets running requests end and ends too.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises ConfigurationError when haproxy is missing, or does not start, as on a taken port."""
        executable = find_haproxy()
        self.settings = settings
        self._folder = tempfile.TemporaryDirectory(prefix="radix-gateway-", ignore_cleanup_errors=True)
        self.admin_socket = Path(self._folder.name) / "admin.sock"
        self.config_path = Path(self._folder.name) / "haproxy.cfg"
        self.config_path.write_text(render(settings, self.admin_socket))
        errors = Path(self._folder.name) / "errors.txt"
        # In a session of its own: an interrupt at the terminal would end it before its requests.
        with errors.open("w") as stream:
            self._process = subprocess.Popen(
                [executable, "-db", "-f", self.config_path],
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                preexec_fn=_drain_with_parent,
            )
        if not self._answers_within(START_TIMEOUT_S):
            self._process.kill()
            self._process.wait()
            problem = errors.read_text().strip()
            self._folder.cleanup()
            raise ConfigurationError(f"gateway: haproxy did not start on {self.url}:\n{problem}")
        self._cleaner = _remove_after(self._process.pid, self._folder.name)

    @property
    def url(self) -> str:
        return f"http://{host_and_port(self.settings.host, self.settings.port)}"

    def wait(self) -> int:
        """Blocks until haproxy ends; its exit status."""
        return self._process.wait()

    def drain(self, url: str) -> None:
        """No new requests for one server, except of sessions it has; what it runs goes on.

        ConfigurationError for an unknown URL.
        """
        self._set_state(url, "drain")

    def ready(self, url: str) -> None:
        """Undo `drain`."""
        self._set_state(url, "ready")

    def is_up(self, url: str) -> bool:
        """What the health checks say."""
        name = self._name(url)
        for line in self._ask(f"show servers state {HEALTHY}").splitlines():
            columns = line.split()
            if len(columns) > 5 and columns[3] == name:
                return columns[5] == "2"
        return False

    def stop(self) -> None:
        """Accept no more, let running requests end within `drain_s`, and end. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)
            try:
                self._process.wait(timeout=self.settings.drain_s + 5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._cleaner.wait()
        self._folder.cleanup()

    def _answers_within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self._ask("show version")
                return True
            time.sleep(0.02)
        return False

    def _set_state(self, url: str, state: str) -> None:
        for backend in (HEALTHY, ANY):
            self._ask(f"set server {backend}/{self._name(url)} state {state}")

    def _name(self, url: str) -> str:
        if url not in self.settings.urls:
            raise ConfigurationError(
                f"gateway: unknown server {url!r}; known: {', '.join(self.settings.urls)}"
            )
        return f"s{list(self.settings.urls).index(url)}"

    def _ask(self, command: str) -> str:
        """One command on haproxy's admin socket. OSError when it does not run."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(self.admin_socket))
            connection.sendall(f"{command}\n".encode())
            parts = []
            while part := connection.recv(1 << 16):
                parts.append(part)
        return b"".join(parts).decode()
