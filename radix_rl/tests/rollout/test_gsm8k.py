"""GSM8K: the data file, the prompt, the score. The questions here are made up."""

import json
import sys
import time
from decimal import Decimal
from types import SimpleNamespace

import pytest

from radix_rl.config.environment import Gsm8kEnvironmentConfig
from radix_rl.errors import ConfigurationError, DataError
from radix_rl.rollout.environments import create_environment
from radix_rl.rollout.environments.gsm8k import final_number, read_records


class SpelledTokenizer:
    """Its chat template gives one id a message: its role's length, then its content's."""

    def apply_chat_template(self, conversation, *, add_generation_prompt, return_dict):
        assert add_generation_prompt
        assert not return_dict
        return [
            number for message in conversation for number in (len(message["role"]), len(message["content"]))
        ]


@pytest.fixture
def write(tmp_path):
    def lines(name, answers):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"question": "q" * n, "answer": a}) + "\n" for n, a in answers))
        return path

    return lines


@pytest.fixture
def environment(write):
    config = Gsm8kEnvironmentConfig(
        train_path=write("train.jsonl", [(n, f"so it is {n}\n#### {n}") for n in range(1, 5)]),
        test_path=write("test.jsonl", [(9, "#### 1,200")]),
        system_prompt="Answer.",
    )
    return create_environment(config, SpelledTokenizer(), seed=3)


def test_problems_are_prompted_through_the_chat_template(environment):
    (problem,) = environment.eval_problems()
    assert problem.prompt_ids == (len("system"), len("Answer."), len("user"), 9)
    assert problem.answer == Decimal(1200)


def test_a_byte_order_mark_before_the_records_is_skipped(tmp_path):
    path = tmp_path / "bom.jsonl"
    path.write_text('{"question": "q", "answer": "#### 1"}\n', encoding="utf-8-sig")
    assert [record.question for record in read_records(path)] == ["q"]


def test_every_epoch_has_each_record_once(environment):
    first = [environment.train_problem(index).problem_id for index in range(4)]
    assert sorted(first) == [f"train-{number}" for number in range(4)]
    assert sorted(environment.train_problem(index).problem_id for index in range(4, 8)) == sorted(first)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("#### 1200", 1.0),
        ("#### 1,200.00 eggs", 1.0),
        ("12 and 100 make $1,200.", 1.0),
        ("1200 #### 7", 0.0),
        ("it is 1200 or 1201", 0.0),
        ("-1200", 0.0),
        ("", 0.0),
        ("####", 0.0),
    ],
)
def test_the_final_number_must_be_exact(environment, text, reward):
    (problem,) = environment.eval_problems()
    assert environment.score(problem, (), text) == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("between 3 and -2.50", "-2.5"),
        ("12,345,678.25", "12345678.25"),
        # Commas that separate no thousands separate numbers.
        ("8,12", "12"),
        ("#### 8,12", "8"),
        ("1,2345", "2345"),
        ("1234,567", "567"),
        ("x is 1, 2 or 3.", "3"),
        # Thousands as LaTeX and typography write them.
        ("1{,}000", "1000"),
        (r"1,\!000", "1000"),
        (r"\$1\,000\,000", "1000000"),
        ("1\u202f000", "1000"),
        ("$12{,}345.5$", "12345.5"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("$.75", "0.75"),
        ("the end.5", "5"),
        # The typographic minus; a minus between two numbers is no sign.
        ("\u22127", "-7"),
        ("10-5", "5"),
        ("(2)-3", "3"),
        ("= -5", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("2+3=5", "5"),
        ("#### 2+3=5", "5"),
        ("#### 7 (of 12)", "7"),
        ("####\n7\nsince 3 + 4 = 7 and 9 > 7", "7"),
        ("#### 7 =", "7"),
        ("50%", "50"),
    ],
)
def test_numbers_are_read_as_people_write_them(text, number):
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["none", "####", "12 #### none", "-", ".", ","])
def test_a_text_without_a_number_has_none(text):
    assert final_number(text) is None


def test_a_long_answer_is_read_in_linear_time():
    started = time.perf_counter()
    assert final_number("1,111" * 200_000) is not None
    assert final_number("-.,$" * 200_000) is None
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{broken", "line 2"),
        ('{"question": "q"}', r"line 2.*answer"),
        ('{"question": "q", "answer": "no mark"}', r"line 2.*no number after '####'"),
        ('{"question": "q", "answer": "#### many"}', r"line 2.*no number"),
        ('{"question": "q", "answer": "#### NaN"}', r"line 2.*no number"),
        ('{"question": "\xff", "answer": "#### 1"}', "line 2"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(write, tmp_path, line, complaint):
    path = write("train.jsonl", [(1, "#### 1")])
    path.write_bytes(path.read_bytes() + line.encode("latin-1") + b"\n")
    config = Gsm8kEnvironmentConfig(train_path=path, test_path=path)
    with pytest.raises(DataError, match=rf"train\.jsonl, {complaint}"):
        create_environment(config, SpelledTokenizer())


def test_a_file_without_records_is_named(write):
    config = Gsm8kEnvironmentConfig(train_path=write("train.jsonl", []), test_path=write("test.jsonl", []))
    with pytest.raises(DataError, match=r"train\.jsonl' has no records"):
        create_environment(config, SpelledTokenizer())


def test_a_tokenizer_without_a_chat_template_is_a_clear_error(environment, monkeypatch):
    def refuse(self, conversation, **options):
        raise ValueError("tokenizer.chat_template is not set")

    monkeypatch.setattr(SpelledTokenizer, "apply_chat_template", refuse)
    with pytest.raises(ConfigurationError, match=r"model\.path: .*chat_template is not set"):
        environment.train_problem(0)


def test_a_hub_that_cannot_be_reached_is_a_clear_error(monkeypatch):
    def load_dataset(name, configuration, split):
        raise ConnectionError("no route to the hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=r"'train' of 'openai/gsm8k' from the hub: no route"):
        create_environment(Gsm8kEnvironmentConfig(hub_dataset="openai/gsm8k"), SpelledTokenizer())


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "absent.jsonl"
    config = Gsm8kEnvironmentConfig(train_path=path, test_path=path)
    with pytest.raises(DataError, match=r"cannot read the data file .*absent\.jsonl"):
        create_environment(config, SpelledTokenizer())


@pytest.mark.parametrize(
    "settings", [{}, {"train_path": "a"}, {"train_path": "a", "test_path": "b", "hub_dataset": "c"}]
)
def test_the_data_come_from_exactly_one_place(settings):
    from radix_rl.config.loading import parse_config

    table = {
        "output_dir": "x",
        "model": {"path": "m"},
        "train": {"steps": 1},
        "environment": {"type": "gsm8k"} | settings,
    }
    with pytest.raises(ConfigurationError, match="train_path and test_path, or hub_dataset"):
        parse_config(table, source="test")
