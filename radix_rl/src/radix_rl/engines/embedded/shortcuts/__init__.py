"""Faster ways through a model's modules, for a model that the engine alone uses.

apply.py           the door: applies them all, and gives back what undoes them
undo.py            what was changed about a model object, and the way back
direct_calls.py    calls without hooks and wrappers
bare_forward.py    a model's forward without transformers' decorators
experts.py         multiplication by experts on a CPU
norms.py           root mean square norms
rotary.py          rotary embeddings
float32.py         bfloat16 products through float32 copies; a setting of its own
"""
