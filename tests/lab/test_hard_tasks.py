"""Every question of a harder task has one answer that the facts determine."""

from collections import Counter
import re

import pytest

from common import decode, tasks

TEST = tasks("test")
ASKED = r"\.?\nQ: The code of (\w+) is"  # the full stop is of an earlier answer


def documents(task, seed=0, B=8, T=400, **options):
    """Yield for each row the facts, the questions and the answers as text."""
    batch = TEST.batch(task, seed, B, T, **options)
    for tokens, facts in zip(batch.tokens, batch.facts):
        questions = []
        answers = []
        start = batch.question
        for span in batch.answers:
            questions.append(decode(tokens[start : span.start]))
            answers.append(decode(tokens[span]))
            start = span.stop
        yield decode(tokens[facts]), questions, answers


@pytest.mark.parametrize("facts, changed, questions", [(4, 2, 1), (3, 1, 3)])
def test_latest_asks_for_the_last_value_of_facts_that_changed(
    facts, changed, questions
):
    interleaved = 0
    options = dict(facts=facts, changed=changed, questions=questions)
    for text, asked, answers in documents("latest", **options):
        stated = re.findall(r" The code of (\w+) is (\d{4})\.", text)
        times = Counter(key for key, _ in stated)
        assert sorted(times.values()) == [1] * (facts - changed) + [2] * changed
        assert len({value for _, value in stated}) == facts + changed
        keys = [re.fullmatch(f"{ASKED} ", question)[1] for question in asked]
        assert len({*keys}) == questions
        newest = dict(stated)  # a later value replaces an earlier
        assert [newest[key] for key in keys] == answers
        assert sum(times[key] == 2 for key in keys) == min(changed, questions)
        interleaved += len({key for key, _ in stated[:facts]}) < facts
    assert interleaved  # a change may come before another first statement


@pytest.mark.parametrize("hops, chains, questions", [(3, 1, 1), (4, 3, 3)])
def test_hops_write_out_every_step_of_a_chain(hops, chains, questions):
    """Whose facts stand in any order."""
    options = dict(hops=hops, chains=chains, questions=questions)
    orders = set()
    for text, asked, answers in documents("hops", **options):
        code = dict(re.findall(r" The code of (\w+) is (\w+)\.", text))
        assert len(code) == hops * chains
        assert len(asked) == questions
        for question, answer in zip(asked, answers):
            key = re.fullmatch(ASKED, question)[1]
            written = ""
            places = []
            for _ in range(hops - 1):
                places.append([*code].index(key))
                key = code[key]
                written += f"{key}. The code of {key} is "
            assert answer == f" {written}{code[key]}"
            assert re.fullmatch(r"\d{4}", code[key])
            orders.add(places == sorted(places))
    assert orders == {True, False}


@pytest.mark.parametrize("kinds, values, questions", [(2, 4, 1), (3, 3, 2)])
def test_list_asks_for_all_numbers_of_a_kind_in_order(kinds, values, questions):
    options = dict(kinds=kinds, values=values, questions=questions)
    for text, asked, answers in documents("list", **options):
        stated = re.findall(r" The (\w+) number is (\d{4})\.", text)
        assert len(stated) == len({value for _, value in stated}) == kinds * values
        assert len(asked) == questions * values
        while asked:
            kind = re.fullmatch(r"\.?\nQ: The (\w+) numbers are ", asked[0])[1]
            of_kind = [value for name, value in stated if name == kind]
            assert answers[:values] == of_kind
            assert asked[1:values] == [", "] * (values - 1)
            del asked[:values], answers[:values]


@pytest.mark.parametrize("votes, labels", [(12, 3), (5, 4)])
def test_count_has_one_label_with_most_of_the_votes(votes, labels):
    last = 0
    options = dict(votes=votes, labels=labels)
    for text, asked, answers in documents("count", B=24, **options):
        given = Counter(re.findall(r" A vote for (\w+)\.", text))
        assert given.total() == votes
        assert len(given) <= labels
        (first, most), *others = given.most_common()
        assert asked == ["\nQ: Most votes are for"]
        assert answers == [f" {first}"]
        assert most == votes // 2 + 1
        numbers = [n for _, n in others]
        assert max(numbers) - min(numbers) <= 1
        last += text.endswith(f" {first}.")
    assert 0 < last < 24  # the newest vote alone does not tell


def test_rule_says_how_to_answer_and_what_never_to_say():
    seen = Counter()
    marks = {"star": "*", "dash": "-"}
    for text, asked, answers in documents("rule", B=48, facts=3, questions=2):
        rules, *_ = text.partition(" The code of")
        form = re.search(r" Answer with a (star|dash)\.", rules)[1]
        never = re.search(r" Never say (\w+)\.", rules)[1]
        first = "form" if rules.startswith(" Answer") else "ban"
        code = dict(re.findall(r"The code of (\w+) is (\w+)\.", text))
        for question, answer in zip(asked, answers):
            value = code[re.fullmatch(ASKED, question)[1]]
            word = "none" if value == never else value
            assert answer == f" {marks[form]} {word}"
        banned = any(answer.endswith("none") for answer in answers)
        seen.update([form, first, banned])
    # each mark, order and ban is drawn
    assert len(seen) == 6 and min(seen.values()) > 8


def test_paraphrase_asks_in_words_that_the_fact_has_not():
    for text, (question,), (answer,) in documents("paraphrase", facts=5):
        key = re.fullmatch(r"\nQ: Which number belongs to (\w+)\? It is ", question)[1]
        stated = re.findall(r" The code of (\w+) is (\d{4})\.", text)
        assert len(stated) == 5
        assert dict(stated)[key] == answer
