"""Faster ways through a model's modules.

direct_calls.py    calls without hooks and wrappers
bare_forward.py    a module's forward without what surrounds it
experts.py         multiplication by experts on a CPU
float32.py         bfloat16 products through float32 copies
norms.py           root mean square norms
rotary.py          rotary embeddings
"""
