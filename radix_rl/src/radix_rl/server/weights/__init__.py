"""Weight updates of the server.

routes.py   the routes: tensors in bodies, over a process group, from disk
bodies.py   what they take, with SGLang's names
state.py    what they share
update.py   the one update that is open, and its version's name
lease.py    whose it is, and until when without a word of its owner
groups.py   the process groups in which the server receives
errors.py   refusals in the shape that SGLang's clients read
"""
