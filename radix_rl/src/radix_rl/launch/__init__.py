"""What a run or a command starts and checks first.

checks.py         combinations of settings that cannot work
model_folder.py   whether a folder holds a model, and what to name in its place
lock.py           one run at a time in an output directory
engines.py        the configured engines
store.py          the run's client of the output store, and what an earlier run left there
gateway.py        one address in front of several servers: HAProxy
"""
