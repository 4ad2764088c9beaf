"""Lossless codecs, chosen by the field and the model, never by the values of one array.

base.py        the contract: an array in, bytes out, and the same array back
raw.py         the array's own bytes
narrow.py      ids of a known range in one or two bytes each
experts.py     ids of up to 256 experts in one byte each, with dense layers and missing rows
positions/     sets of key positions that indexers choose
deltas.py      ids that mostly ascend, as differences in the bytes each needs
"""
