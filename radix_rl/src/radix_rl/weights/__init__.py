"""Weight sync: a trainer's new weights reach every engine, or none.

sync.py           a version to the whole fleet: pause, begin, buckets, commit, resume
transports/       the ways that buckets travel
update_group.py   the torch process group of a trainer and its engines
release.py        a model's parameters, given away one by one
"""
