"""What a run shows of itself.

observer.py   everything below together, around one run
tolerance.py  what only observes a run never ends it
trackers/     where metrics go, one file a destination
metrics.py    reads metrics.jsonl
progress.py   the bar on a terminal, the plain lines elsewhere
quiet.py      keeps bars and warnings of transformers out of it
summary.py    summary.json: the figures of a finished run
report.py     report.html: a run on one page
plots.py      the report's plots
whole_file.py files that are written whole or not at all
"""
