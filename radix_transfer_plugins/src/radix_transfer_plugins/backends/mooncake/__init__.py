"""`mooncake`: many machines. The client's wheel is imported when a backend is created, not before.

backend.py      puts, reads, deletes
config.py       what a user writes, checked and in its units
client.py       the native client, set up and closed safely
gate.py         retrying what found the client's local buffer full
stored.py       what an object looks like inside Mooncake: its key, and its value with a trailer
master_http.py  the master's HTTP server: keys and capacity
status.py       the client's status codes, and the errors they become
local.py        a master and a segment on this machine, for as long as a block
"""

from radix_transfer_plugins.backends.mooncake.backend import MooncakeBackend
from radix_transfer_plugins.backends.mooncake.config import MooncakeConfig

__all__ = ["MooncakeBackend", "MooncakeConfig"]
