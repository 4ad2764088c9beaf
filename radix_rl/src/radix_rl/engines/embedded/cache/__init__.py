"""Memory for keys, values and replay rows.

slots.py           preallocated slots of running requests
prefixes.py        prefixes kept for later requests
freed_memory.py    freed memory given back to the system
"""
