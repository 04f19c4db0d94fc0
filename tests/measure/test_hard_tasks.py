"""Every question of a harder task has one answer that the facts determine."""
from collections import Counter
import re

import numpy as np
import pytest

from common import decode, tasks
from nanollm.measure.hard_tasks import HARD
from nanollm.measure.tasks import ANSWER, FACT, QUESTION, TEXT
from nanollm.training.train import HARDER, document

TEST = tasks("test")


def documents(task, seed=0, B=8, T=400, **options):
    """Yield for each row the facts as text, and the questions as (text, answer) pairs."""
    batch = TEST.batch(task, seed, B, T, **options)
    spans = [*zip([batch.question] + [a.stop for a in batch.answers], batch.answers)]
    for tokens, facts in zip(batch.tokens, batch.facts):
        asked = [(decode(tokens[start:a.start]), decode(tokens[a])) for start, a in spans]
        yield decode(tokens[facts]), asked


@pytest.mark.parametrize("facts, questions", [(6, 4), (3, 3)])
def test_turns_ask_for_different_facts(facts, questions):
    for text, asked in documents("turns", facts=facts, questions=questions):
        code = dict(re.findall(r"of (\w+) is (\d{4})\.", text))
        keys = [re.fullmatch(r"\.?\nQ: The code of (\w+) is ", question)[1] for question, _ in asked]
        assert len(code) == facts and len({*keys}) == len(keys) == questions
        assert [code[key] for key in keys] == [answer for _, answer in asked]


@pytest.mark.parametrize("facts, changed, questions", [(4, 2, 1), (5, 5, 5), (3, 1, 3)])
def test_latest_asks_for_the_last_value_of_facts_that_changed(facts, changed, questions):
    interleaved = 0
    for text, asked in documents("latest", facts=facts, changed=changed, questions=questions):
        stated = re.findall(r" The code of (\w+) is (\d{4})\.", text)
        times, newest = Counter(key for key, _ in stated), dict(stated)  # a later value replaces an earlier
        assert sorted(times.values()) == [1] * (facts - changed) + [2] * changed
        assert len({value for _, value in stated}) == facts + changed
        keys = [re.fullmatch(r"\.?\nQ: The code of (\w+) is ", question)[1] for question, _ in asked]
        assert len({*keys}) == questions and [newest[key] for key in keys] == [x for _, x in asked]
        assert sum(times[key] == 2 for key in keys) == min(changed, questions)
        interleaved += len({key for key, _ in stated[:facts]}) < facts
    assert interleaved or changed == 1 and facts == 3  # a change may come before another first statement


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
            written = " " + "".join(f"{word}. The code of {word} is " for word in steps[:-1]) + key
            assert answer == written
    orders = {tuple(text.index(f" The code of {key} ") < text.index(f" The code of {value} ")
                    for key, value in re.findall(r" The code of (\w+) is ([a-z]+)\.", text))
              for text, _ in documents("hops", hops=3, chains=1)}
    assert len(orders) > 1  # a chain's facts stand in any order


@pytest.mark.parametrize("kinds, values, questions", [(2, 4, 1), (1, 2, 1), (3, 3, 2)])
def test_list_asks_for_all_numbers_of_a_kind_in_order(kinds, values, questions):
    for text, asked in documents("list", kinds=kinds, values=values, questions=questions):
        stated = re.findall(r" The (\w+) number is (\d{4})\.", text)
        assert len(stated) == kinds * values == len({value for _, value in stated})
        for i in range(0, len(asked), values):
            (question, _), *others = asked[i:i + values]
            kind = re.fullmatch(r"\.?\nQ: The (\w+) numbers are ", question)[1]
            assert [x for _, x in asked[i:i + values]] == [value for name, value in stated if name == kind]
            assert {text for text, _ in others} == {", "}


@pytest.mark.parametrize("votes, labels", [(12, 3), (5, 4), (9, 2)])
def test_count_has_one_label_with_most_of_the_votes(votes, labels):
    last = 0
    for text, ((question, answer),) in documents("count", B=24, votes=votes, labels=labels):
        given = Counter(re.findall(r" A vote for (\w+)\.", text))
        (first, most), *others = given.most_common()
        assert question == "\nQ: Most votes are for" and answer == f" {first}"
        assert len(given) <= labels and most == votes // 2 + 1 and sum(given.values()) == votes
        assert max(n for _, n in others) - min(n for _, n in others) <= 1
        last += text.endswith(f" {first}.")
    assert 0 < last < 24  # the newest vote alone does not tell


@pytest.mark.parametrize("first", ["form", "ban", None])
@pytest.mark.parametrize("banned", [True, False, None])
def test_rule_says_how_to_answer_and_what_never_to_say(first, banned):
    marks, hidden, firsts = Counter(), 0, Counter()
    for text, asked in documents("rule", B=24, facts=3, questions=2, first=first, banned=banned):
        form, never = re.search(r" Answer with a (star|dash)\.", text)[1], re.search(r" say (\w+)\.", text)[1]
        assert re.match(r" (Answer with a \w+\. Never say|Never say \w+\. Answer)", text)
        firsts["form" if text.startswith(" Answer") else "ban"] += 1
        code = dict(re.findall(r"The code of (\w+) is (\w+)\.", text))
        for question, answer in asked:
            value = code[re.fullmatch(r"\.?\nQ: The code of (\w+) is", question)[1]]
            mark, word = re.fullmatch(r" (.) (\w+)", answer).groups()
            assert mark == {"star": "*", "dash": "-"}[form] and word == ("none" if value == never else value)
            marks[mark] += 1
            hidden += word == "none"
    assert len(marks) == 2 and (len(firsts) == 2 if first is None else {*firsts} == {first})
    assert hidden == 24 if banned else hidden == 0 if banned is False else 0 < hidden < 24


def test_paraphrase_asks_in_words_that_the_fact_has_not():
    for text, ((question, answer),) in documents("paraphrase", facts=5):
        key = re.fullmatch(r"\nQ: Which number belongs to (\w+)\? It is ", question)[1]
        assert dict(re.findall(r" The code of (\w+) is (\d{4})\.", text))[key] == answer
        assert len(re.findall("The code of", text)) == 5


@pytest.mark.parametrize("task", HARD)
def test_documents_align_and_a_seed_decides_them(task):
    batch, again, other = (TEST.batch(task, seed, 5, 450) for seed in (3, 3, 4))
    assert (batch.tokens == again.tokens).all() and (batch.tokens != other.tokens).mean() > 0.5
    for tokens, roles in zip(batch.tokens, batch.roles):
        assert np.isin(roles[batch.question:], (QUESTION, ANSWER)).all() and tokens[0] == TEST.bos
        assert np.isin(roles[:batch.question], (TEXT, FACT)).all()
        assert tokens[roles == TEXT][1:].tobytes() in TEST.stream.tobytes()


@pytest.mark.parametrize("task, options, message", [
    ("latest", dict(changed=5), "changed 5 .* 4"), ("latest", dict(questions=9), "questions 9"),
    ("hops", dict(hops=1), "hops 1"), ("hops", dict(questions=3), "questions 3"),
    ("list", dict(kinds=1, questions=2), "questions 2"), ("count", dict(labels=1), "labels 1"),
    ("count", dict(votes=3), "votes 3"),
    ("rule", dict(questions=5), "questions 5"), ("paraphrase", dict(questions=5), "questions 5")])
def test_what_cannot_be_asked_for_is_refused(task, options, message):
    with pytest.raises(ValueError, match=message):
        TEST.batch(task, 0, 1, 400, **options)


@pytest.mark.parametrize("T, mixture", [(T, mixture) for _, T, _, mixture in HARDER])
def test_every_document_fits_its_stage(T, mixture):
    assert {*HARD} < {*mixture}
    for task in mixture:
        for seed in range(40):
            tokens, weights = document(np.random.default_rng(seed), T + 1, task, tasks("train"), True)
            assert tokens.shape == weights.shape == (T + 1,) and tokens[0] == TEST.bos
            assert weights.max() == (1 if task == "plain" else 4), task
