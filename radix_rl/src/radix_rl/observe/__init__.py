"""What a run shows: metrics, progress, a summary and a report."""
