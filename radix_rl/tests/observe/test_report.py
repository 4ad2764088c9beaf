"""The summary's arithmetic and the report's page."""

import re
from html.parser import HTMLParser

import pytest

from radix_rl.errors import DataError
from radix_rl.observe.plots import PLOTS, draw
from radix_rl.observe.report import headline, write_report
from radix_rl.observe.summary import read_summary, summarize, write_summary
from radix_rl.observe.trackers.json_lines import JsonLinesTracker

RECORDS = [
    {"step": 0, "eval/accuracy": 0.25},
    {
        "step": 1,
        "mismatch/mean_abs_with_replay": 9.0,
        "mismatch/k3_with_replay": 9.0,
        "rollout/response_bytes_inline": 100.0,
    },
    {
        "step": 2,
        "eval/accuracy": 0.75,
        "mismatch/mean_abs_with_replay": 1.0,
        "mismatch/mean_abs_without_replay": 4.0,
        "mismatch/k3_with_replay": 0.5,
        "mismatch/k3_without_replay": 5.0,
        "replay/router_disagreement": 0.125,
        "rollout/response_bytes_inline": 300.0,
        "rollout/response_bytes_store": 40.0,
    },
]


@pytest.fixture
def run_dir(tmp_path):
    with JsonLinesTracker(tmp_path / "metrics.jsonl") as tracker:
        for record in RECORDS:
            tracker.log(record["step"], {name: value for name, value in record.items() if name != "step"})
    return tmp_path


def test_a_summary_compares_replay_on_the_steps_that_measured_both():
    assert summarize(RECORDS) == {
        "steps": 2.0,
        "accuracy_before": 0.25,
        "accuracy_after": 0.75,
        "mismatch_with_replay": 1.0,
        "mismatch_without_replay": 4.0,
        "k3_with_replay": 0.5,
        "k3_without_replay": 5.0,
        "router_disagreement": 0.125,
        "response_bytes_inline": 400.0,
        "response_bytes_store": 40.0,
    }


def test_headline_figures_are_those_of_the_summary():
    cards = {
        card.label: (card.value, card.note) for card in headline(summarize(RECORDS) | {"objects_left": 0})
    }
    assert cards["Held-out accuracy"] == ("25.0% → 75.0%", "+50.0 points")
    assert cards["Mean log-probability mismatch"] == ("4 → 1", "4.0 times smaller with replay")
    assert cards["KL estimate (k3)"] == ("5 → 0.5", "10.0 times smaller with replay")
    assert cards["Replay outputs in answers"] == ("400 B → 40 B", "10.0 times smaller through the store")
    assert cards["Objects left in the store"] == ("0", "")


def test_a_run_without_evaluation_shows_its_reward():
    records = [{"step": step, "rollout/reward_mean": float(step)} for step in range(1, 21)]
    summary = summarize(records)
    assert (summary["reward_first"], summary["reward_last"]) == (1.5, 19.5)
    (card,) = headline(summary)
    assert (card.label, card.value) == ("Mean reward", "1.500 → 19.500")
    assert "Mean reward" not in [card.label for card in headline(summary | summarize(RECORDS))]


def test_a_run_without_replay_and_store_has_no_plots_and_cards_of_them():
    dense = [
        {
            "step": step,
            "rollout/reward_mean": 0.5,
            "rollout/response_bytes_inline": 0.0,
            "rollout/response_bytes_store": 0.0,
            "mismatch/mean_abs_without_replay": 0.01,
        }
        for step in (1, 2)
    ]
    titles = [plot.title for plot in PLOTS if draw(plot, dense) is not None]
    assert titles == ["Reward", "Log-probability mismatch, rollout against trainer"]
    assert [card.label for card in headline(summarize(dense) | {"objects_left": 0})] == ["Mean reward"]


def test_dark_mode_changes_the_colours_of_page_and_plots(run_dir):
    html = write_report(run_dir).read_text()
    dark = html.partition("@media (prefers-color-scheme: dark)")[2].partition("\n  }")[0]
    used = set(re.findall(r"var\((--[\w-]+)", html))
    assert {"--plot-text", "--plot-series-1", "--ink", "--card"} <= used
    assert [name for name in sorted(used) if f"{name}:" not in dark] == []
    # No colour of the plots is fixed.
    assert re.findall(r"(?:fill|stroke): #(?!000000)\w+", html.partition("<main>")[2]) == []


def test_a_page_refers_to_nothing_outside_itself(run_dir):
    html = write_report(run_dir).read_text()
    outside = set(re.findall(r"https?://[^\"'<> )]+", html))
    # Names of XML vocabularies, which nothing fetches.
    assert outside <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", html)


def test_a_page_is_well_formed_and_shows_only_what_was_measured(run_dir):
    html = write_report(run_dir).read_text()
    counts: dict[str, int] = {}

    class Tags(HTMLParser):
        def handle_starttag(self, tag, attrs):
            counts[tag] = counts.get(tag, 0) + 1

        def handle_endtag(self, tag):
            counts[f"/{tag}"] = counts.get(f"/{tag}", 0) + 1

    Tags().feed(html)
    for tag in ("figure", "svg", "table", "details", "div", "main", "html"):
        assert counts[tag] == counts[f"/{tag}"]
    # Reward (as accuracy), mismatch, k3, bytes.
    assert counts["figure"] == 4
    assert "Response length" not in html


def test_settings_and_summary_are_on_the_page_escaped(run_dir):
    (run_dir / "config.toml").write_text('output_dir = "<script>"\n[train]\nsteps = 3\n')
    write_summary(run_dir, {"objects_left": 0, "seconds": 300.0})
    html = write_report(run_dir).read_text()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "train.steps" in html
    assert "5.0 min" in html


def test_a_report_needs_metrics(tmp_path):
    with pytest.raises(DataError, match=r"cannot read metrics .*metrics\.jsonl"):
        write_report(tmp_path)


def test_a_plot_skips_steps_that_lack_its_metric():
    (bytes_plot,) = [plot for plot in PLOTS if "Bytes" in plot.title]
    assert draw(bytes_plot, [{"step": 0, "eval/accuracy": 1.0}]) is None
    svg = draw(bytes_plot, RECORDS)
    assert svg is not None
    assert svg.startswith("<svg role=")
    assert "<metadata" not in svg


def test_a_summary_is_replaced_as_a_whole(tmp_path):
    assert read_summary(tmp_path) == {}
    write_summary(tmp_path, {"objects_left": 3})
    write_summary(tmp_path, {"objects_left": 0})
    assert read_summary(tmp_path) == {"objects_left": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("name", ["summary.json", "report.html"])
def test_what_does_not_fit_on_the_disk_is_named_and_leaves_the_old_file(
    name, tmp_path, files_grow_no_larger_than
):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    (tmp_path / name).write_text("{}")
    with files_grow_no_larger_than(5), pytest.raises(OSError, match=f"File too large: '{tmp_path / name}'"):
        write_summary(tmp_path, {"steps": 1.0}) if name == "summary.json" else write_report(tmp_path)
    assert (tmp_path / name).read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["metrics.jsonl", name])
