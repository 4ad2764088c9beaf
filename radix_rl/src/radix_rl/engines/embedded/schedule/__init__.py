"""Which requests run, in which slots, and when they end.

scheduler.py          queue, admission, chunks of long prompts, retraction, ends
sequence.py           one request on its way through the engine
slot_table.py         which request owns which slot
shared_prefixes.py    prompts that are being prefilled already
finish.py             stop strings, stop tokens, length
limits.py             what a request may ask for

`n` answers to one prompt are `n` requests by the time they come here: the server expands them
(`server/items.py`).
"""
