"""The demo's parts: its worked answers, its tokenizer, its claims."""

import random
import sys
from pathlib import Path

import pytest

from radix_rl.config import load_config
from radix_rl.errors import ConfigurationError
from radix_rl.rollout.environments.arithmetic import ArithmeticEnvironment, Sum, final_number, is_held_out

DEMO = Path(__file__).resolve().parents[2] / "examples/demo"

GOOD = {
    "accuracy_before": 0.4,
    "accuracy_after": 0.7,
    "mismatch_with_replay": 1e-3,
    "mismatch_without_replay": 2e-3,
    "k3_with_replay": 1e-5,
    "k3_without_replay": 4e-5,
    "router_disagreement": 0.03,
    "response_bytes_inline": 2e6,
    "response_bytes_store": 1e6,
    "objects_left": 0,
    "seconds": 100.0,
    "report": "report.html",
}


@pytest.fixture(scope="module")
def demo():
    """The example's modules by name."""
    sys.path.insert(0, str(DEMO))
    try:
        import run
        import warm_start
    finally:
        sys.path.remove(str(DEMO))
    yield {"run": run, "warm_start": warm_start}
    del sys.modules["run"], sys.modules["warm_start"]


@pytest.fixture(scope="module")
def environment(demo):
    return ArithmeticEnvironment(demo["warm_start"].make_tokenizer(), carry_share=0.75, num_eval_problems=64)


def test_the_checked_in_configuration_parses():
    config = load_config(DEMO / "config.toml")
    assert config.engine.dtype == "bfloat16"  # pyright: ignore[reportAttributeAccessIssue]
    assert config.train.dtype == "float32"
    assert config.train.replay_routed_experts


def test_stories_have_no_unknown_words_and_digits_stand_alone(demo, environment):
    tokenizer = demo["warm_start"].make_tokenizer()
    for problem in [environment.train_problem(index) for index in range(200)]:
        assert tokenizer.unk_token_id not in problem.prompt_ids
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("47 apples")) == ["4", "7", "apples"]


def test_held_out_operands_never_appear_in_training(environment):
    trained = {(s.x, s.y) for s in (environment.train_sum(index) for index in range(3000))}
    assert not any(is_held_out(x, y) for x, y in trained)
    evaluated = {environment.eval_problems()[index].answer for index in range(64)}
    assert len(evaluated) > 20


def test_the_asked_for_share_of_problems_needs_a_carry(environment):
    share = sum(environment.train_sum(index).needs_carry for index in range(2000)) / 2000
    assert share == pytest.approx(0.75, abs=0.04)


def test_problems_are_the_same_each_time(environment, demo):
    again = ArithmeticEnvironment(demo["warm_start"].make_tokenizer(), carry_share=0.75, num_eval_problems=64)
    assert again.train_problem(17) == environment.train_problem(17)
    assert again.eval_problems() == environment.eval_problems()


def test_worked_answers_forget_three_carries_in_four_and_nothing_else(demo):
    rng = random.Random(0)
    with_carry = [demo["warm_start"].careless_answer(Sum("", 47, 35), rng) for _ in range(400)]
    assert set(with_carry) == {
        "7 + 5 = 12 ; 4 + 3 + 1 = 8 ; 82 <eos>",
        "7 + 5 = 12 ; 4 + 3 + 0 = 7 ; 72 <eos>",
    }
    assert with_carry.count("7 + 5 = 12 ; 4 + 3 + 1 = 8 ; 82 <eos>") == pytest.approx(100, abs=30)
    assert demo["warm_start"].careless_answer(Sum("", 41, 35), rng) == "1 + 5 = 6 ; 4 + 3 + 0 = 7 ; 76 <eos>"


@pytest.mark.parametrize(
    ("text", "number"),
    [("7 + 5 = 1 2 ; 8 2", 82), ("82", 82), ("8 2 ;", None), ("", None), ("1 0 ; 1 0 3 ", 103)],
)
def test_the_final_number_is_what_the_text_ends_with(text, number):
    assert final_number(text) == number


def test_the_score_is_1_for_the_sum_and_0_otherwise(environment):
    problem = environment.train_problem(0)
    assert environment.score(problem, (), f"; {problem.answer}") == 1.0
    assert environment.score(problem, (), f"; {problem.answer + 1}") == 0.0


def test_good_figures_pass(demo, capsys):
    assert demo["run"].show_results(GOOD) == 0
    assert "40.0% -> 70.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy_after", 0.6),
        ("k3_without_replay", 1.9e-5),
        ("mismatch_without_replay", 0.9e-3),
        ("objects_left", 1),
        ("router_disagreement", 0.0),
        ("response_bytes_store", 3e6),
    ],
)
def test_a_claim_that_fails_fails_the_demo(demo, name, value):
    assert demo["run"].show_results(GOOD | {name: value}) == 1


def test_only_an_earlier_demo_is_removed(demo, tmp_path):
    precious = tmp_path / "thesis.txt"
    precious.write_text("all of it")
    with pytest.raises(ConfigurationError, match="holds no earlier demo and is not removed"):
        demo["run"].remove_earlier_demo(tmp_path)
    assert precious.exists()
    earlier = tmp_path / "earlier"
    (earlier / "warm-start").mkdir(parents=True)
    demo["run"].remove_earlier_demo(earlier)
    assert not earlier.exists()
    demo["run"].remove_earlier_demo(earlier)


def test_a_mistaken_override_is_one_message(demo, capsys):
    assert demo["run"].main(["train.stepz=1"]) == 2
    assert "train.stepz: unknown setting" in capsys.readouterr().err
