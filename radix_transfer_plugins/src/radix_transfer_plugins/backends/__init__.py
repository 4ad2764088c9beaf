"""Where objects lie.

base.py         the contract: bytes in, bytes out
config.py       what the configurations of all backends share
lease.py        the lease of backends whose buffers live as long as something looks at them
memory.py       `memory`: one process
shared_memory/  `shared_memory`: one machine, no server
mooncake/       `mooncake`: many machines, through a Mooncake master
"""
