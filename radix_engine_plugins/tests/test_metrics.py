"""Metrics beside an engine's own."""

import subprocess
import sys

import numpy as np

from radix_engine_plugins.logprobs import LOGPROB_FLOOR, floored
from radix_engine_plugins.metrics import engine_metrics

PROGRAM = """
import os, sys
import radix_engine_plugins.writer, radix_engine_plugins.metrics as metrics
assert "prometheus_client" not in sys.modules
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
metrics.engine_metrics().puts.inc(3)
metrics.engine_metrics().pending_puts.inc()
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_counts_reach_an_engine_that_names_its_folder_after_the_plugin_was_loaded(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, check=True
    )
    assert "output_store_puts_total 3.0" in done.stdout
    assert "output_store_pending_puts 1.0" in done.stdout


def test_all_writers_of_an_engines_process_share_its_metrics():
    assert engine_metrics() is engine_metrics()


def test_what_is_not_finite_becomes_the_floor_and_is_counted():
    given = np.array([-0.5, -np.inf, np.nan, np.inf, 0.0], np.float32)
    logprobs, count = floored(given)
    assert count == 3
    assert logprobs.dtype == np.float32
    assert logprobs.tolist() == [-0.5, LOGPROB_FLOOR, LOGPROB_FLOOR, LOGPROB_FLOOR, 0.0]
    assert np.isnan(given[2])


def test_finite_log_probabilities_are_not_copied():
    given = np.array([-0.5, -3.0], np.float32)
    logprobs, count = floored(given)
    assert logprobs is given
    assert count == 0
