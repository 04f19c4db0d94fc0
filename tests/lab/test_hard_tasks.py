"""Every question of a harder task has one answer that the facts determine."""

from collections import Counter
import re

import pytest

from common import decode, tasks

TEST = tasks("test")


def documents(task, seed=0, B=8, T=400, **options):
    """Yield for each row the facts as text, and the questions as (text, answer) pairs."""
    batch = TEST.batch(task, seed, B, T, **options)
    spans = [*zip([batch.question] + [a.stop for a in batch.answers], batch.answers)]
    for tokens, facts in zip(batch.tokens, batch.facts):
        asked = [
            (decode(tokens[start : a.start]), decode(tokens[a])) for start, a in spans
        ]
        yield decode(tokens[facts]), asked


@pytest.mark.parametrize("facts, changed, questions", [(4, 2, 1), (5, 5, 5), (3, 1, 3)])
def test_latest_asks_for_the_last_value_of_facts_that_changed(
    facts, changed, questions
):
    interleaved = 0
    for text, asked in documents(
        "latest", facts=facts, changed=changed, questions=questions
    ):
        stated = re.findall(r" The code of (\w+) is (\d{4})\.", text)
        # a later value replaces an earlier
        times, newest = Counter(key for key, _ in stated), dict(stated)
        assert sorted(times.values()) == [1] * (facts - changed) + [2] * changed
        assert len({value for _, value in stated}) == facts + changed
        keys = [
            re.fullmatch(r"\.?\nQ: The code of (\w+) is ", question)[1]
            for question, _ in asked
        ]
        assert len({*keys}) == questions and [newest[key] for key in keys] == [
            x for _, x in asked
        ]
        assert sum(times[key] == 2 for key in keys) == min(changed, questions)
        interleaved += len({key for key, _ in stated[:facts]}) < facts
    # a change may come before another first statement
    assert interleaved or changed == 1 and facts == 3


@pytest.mark.parametrize("hops, chains, questions", [(3, 2, 1), (2, 1, 1), (4, 3, 3)])
def test_hops_write_out_every_step_of_a_chain(hops, chains, questions):
    for text, asked in documents("hops", hops=hops, chains=chains, questions=questions):
        code = dict(re.findall(r" The code of (\w+) is (\w+)\.", text))
        assert len(code) == hops * chains
        for question, answer in asked:
            key, steps = re.fullmatch(r"\.?\nQ: The code of (\w+) is", question)[1], []
            for _ in range(hops):
                steps.append(code[key])
                key = code[key]
            assert re.fullmatch(r"\d{4}", key)
            written = (
                " "
                + "".join(f"{word}. The code of {word} is " for word in steps[:-1])
                + key
            )
            assert answer == written
    orders = {
        tuple(
            text.index(f" The code of {key} ") < text.index(f" The code of {value} ")
            for key, value in re.findall(r" The code of (\w+) is ([a-z]+)\.", text)
        )
        for text, _ in documents("hops", hops=3, chains=1)
    }
    assert len(orders) > 1  # a chain's facts stand in any order


@pytest.mark.parametrize("kinds, values, questions", [(2, 4, 1), (1, 2, 1), (3, 3, 2)])
def test_list_asks_for_all_numbers_of_a_kind_in_order(kinds, values, questions):
    for text, asked in documents(
        "list", kinds=kinds, values=values, questions=questions
    ):
        stated = re.findall(r" The (\w+) number is (\d{4})\.", text)
        assert len(stated) == kinds * values == len({value for _, value in stated})
        for i in range(0, len(asked), values):
            (question, _), *others = asked[i : i + values]
            kind = re.fullmatch(r"\.?\nQ: The (\w+) numbers are ", question)[1]
            assert [x for _, x in asked[i : i + values]] == [
                value for name, value in stated if name == kind
            ]
            assert {text for text, _ in others} == {", "}


@pytest.mark.parametrize("votes, labels", [(12, 3), (5, 4), (9, 2)])
def test_count_has_one_label_with_most_of_the_votes(votes, labels):
    last = 0
    for text, ((question, answer),) in documents(
        "count", B=24, votes=votes, labels=labels
    ):
        given = Counter(re.findall(r" A vote for (\w+)\.", text))
        (first, most), *others = given.most_common()
        assert question == "\nQ: Most votes are for" and answer == f" {first}"
        assert (
            len(given) <= labels
            and most == votes // 2 + 1
            and sum(given.values()) == votes
        )
        assert max(n for _, n in others) - min(n for _, n in others) <= 1
        last += text.endswith(f" {first}.")
    assert 0 < last < 24  # the newest vote alone does not tell


def test_rule_says_how_to_answer_and_what_never_to_say():
    seen = Counter()
    for text, asked in documents("rule", B=48, facts=3, questions=2):
        form, never = (
            re.search(r" Answer with a (star|dash)\.", text)[1],
            re.search(r" say (\w+)\.", text)[1],
        )
        first = re.match(
            r" (Answer) with a \w+\. Never say| (Never) say \w+\. Answer", text
        )[0][:7]
        code = dict(re.findall(r"The code of (\w+) is (\w+)\.", text))
        for question, answer in asked:
            value = code[re.fullmatch(r"\.?\nQ: The code of (\w+) is", question)[1]]
            mark, word = re.fullmatch(r" (.) (\w+)", answer).groups()
            assert mark == {"star": "*", "dash": "-"}[form] and word == (
                "none" if value == never else value
            )
        seen.update([form, first, any(answer.endswith("none") for _, answer in asked)])
    # each mark, order and ban is drawn
    assert len(seen) == 6 and min(seen.values()) > 8


def test_paraphrase_asks_in_words_that_the_fact_has_not():
    for text, ((question, answer),) in documents("paraphrase", facts=5):
        key = re.fullmatch(r"\nQ: Which number belongs to (\w+)\? It is ", question)[1]
        assert dict(re.findall(r" The code of (\w+) is (\d{4})\.", text))[key] == answer
        assert len(re.findall("The code of", text)) == 5
