"""The chats that a converted model is judged by, and the prompts that calibration may show it."""

import json

import pytest

from tests.pages import script
from upcycle.data.documents import packaged_text

PROMPTS, SURVIVAL = script("chat_prompts"), script("chat_survival")
chats, items, words = PROMPTS.chats, PROMPTS.items, PROMPTS.words
problems_of, wilson = SURVIVAL.problems_of, SURVIVAL.wilson


def grams(text: str, size: int = 13) -> set[tuple[str, ...]]:
    found = words(text)
    return {tuple(found[start : start + size]) for start in range(len(found) - size + 1)}


def test_there_are_two_hundred_and_calibration_has_none_of_them() -> None:
    judged = [turns for _, turns in chats()]
    assert len(judged) == 200
    assert len({turns[0].text for turns in judged}) == 200
    lines = packaged_text("prompts").read_text(encoding="utf-8").splitlines()
    shown = [turn for line in lines for turn in json.loads(line)["turns"]]
    assert len(shown) == len({turn.lower() for turn in shown}) > 150
    own = {turn.text.lower() for turns in judged for turn in turns}
    assert not own & {turn.lower() for turn in shown}
    of_calibration = set().union(*(grams(turn) for turn in shown))
    together = [" ".join(turn.text for turn in turns) for turns in judged]
    assert not of_calibration & set().union(*map(grams, together))


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("", ["empty"]),
        ("1. Practise in the water.\n2. Breathe out.\n3. Relax with a teacher.", []),
        ("Practise in the water with a teacher.", ["3 items"]),
        ("- eau\n- mer\n- lac bleu", ["English"]),
    ],
)
def test_rules_say_what_is_broken(text: str, broken: list[str]) -> None:
    tips = next(turns[0] for kind, turns in chats() if kind == "list")
    assert problems_of(text, list(range(40)), tips) == broken


def test_a_loop_is_broken_whatever_it_says() -> None:
    tips = next(turns[0] for kind, turns in chats() if kind == "list")
    assert "loop" in problems_of("- the\n- the\n- the", [1, 2] * 30, tips)


def test_bold_lines_and_numbers_are_items() -> None:
    holds = items(3)["3 items"]
    assert holds("**One**: a\n\n**Two**: b\n\n**Three**: c")
    assert holds("1) a\n2) b\n3) c")
    assert not holds("one\ntwo\nthree")


def test_an_interval_of_a_share() -> None:
    low, high = wilson(8, 10)  # Wilson's own formula, by hand
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert wilson(0, 0) == (0.0, 1.0)
