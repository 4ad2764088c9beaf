"""Status codes of the Mooncake client, and the errors they become."""

from radix_transfer_plugins.errors import StoreUnavailableError

OK = 0
SEGMENTS_FULL = -200
BUFFER_FULL = -600
NOT_FOUND = -704
TRANSFER_FAILED = -800
RPC_FAILED = -900
RPC_TIMED_OUT = -901
UNANSWERED = (RPC_FAILED, RPC_TIMED_OUT)
"""The master is gone or stopped: to ask it again would only wait once more."""

_MEANINGS = {
    -1: "internal error",
    SEGMENTS_FULL: "no room in the segments",
    -400: "invalid key",
    BUFFER_FULL: "invalid parameters, or no room in the local buffer",
    -703: "replica not ready: another client is writing it, or was killed while it did",
    NOT_FOUND: "object not found",
    -706: "object has a lease",
    TRANSFER_FAILED: "transfer failed: the process whose segment holds the bytes does not answer",
    RPC_FAILED: "the master does not answer",
    RPC_TIMED_OUT: "the master did not answer within timeout_s; it may be stopped",
}


def describe(status: int) -> str:
    return f"status {status} ({_MEANINGS.get(status, 'see the client log on stderr')})"


def unavailable(operation: str, status: int, master: object) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"mooncake: {operation} failed with {describe(status)}; master {master}. Check that mooncake_master "
        "and the processes that contribute segments run; a restarted master has forgotten what it held"
    )
