"""Questions on a text that was read once: the answers are those of each question alone."""

from types import SimpleNamespace

from pytest import mark, raises
import torch

from common import ENCODING
from lab.questions import ask, compressed
from methods.baselines.kvzip import KVzip
from nanollm import TINY
from nanollm.bridge import attach, detach
from nanollm.checkpoint import hf_model

TEXT = "The code of table is 52. For the question, that of river is 18. " * 3


class Words:
    """Called as transformers' tokenizers are."""

    eos_token_id = 2

    def __init__(self, chat_template):
        self.chat_template = chat_template

    def __call__(self, text, add_special_tokens, return_tensors):
        ids = ENCODING.encode_ordinary(text)
        if add_special_tokens:
            ids = [1, *ids, self.eos_token_id]
        return SimpleNamespace(input_ids=torch.tensor([ids]))

    def apply_chat_template(self, chat, tokenize, add_generation_prompt):
        return self.chat_template.format(chat[0]["content"])

    def decode(self, row, skip_special_tokens):
        return ENCODING.decode(row.tolist())


@mark.parametrize(
    "template, start, end",
    [(None, "", "\n\n"), ("I: {}\nA:", "I: ", "\nA:")],
)
@torch.no_grad()
def test_a_text_is_read_once_and_each_question_is_answered_as_alone(
    template, start, end
):
    model, words = hf_model(TINY), Words(template)
    questions = [
        "The code of river is",
        "The code of table is",
        "What is it that came?",
    ]
    context = words(f"{start}{TEXT}\n\n", False, "pt").input_ids
    if not template:  # without the token that ends a text
        context = torch.cat((torch.tensor([[1]]), context), 1)
    expected = []
    for question in questions:
        asked = words(question + end, False, "pt").input_ids
        memory = attach(model, KVzip, budget=context.shape[1] // 2)
        model(context, past_key_values=memory)
        memory.compress(context)
        prompt = torch.cat((context, asked), 1)
        written = model.generate(
            prompt, past_key_values=memory, max_new_tokens=6, do_sample=False
        )
        expected.append(ENCODING.decode(written[0, prompt.shape[1] :].tolist()).strip())
    assert ask(model, words, TEXT, questions, "kvzip", 0.5, 6) == expected
    detach(model)
    with raises(ZeroDivisionError), compressed(model, context, budget=9) as memory:
        ask(model, words, TEXT, questions[:1], new=1)  # leaves the model attached
        assert hasattr(model, "attachment")
        assert memory.caches[0].method.budget == 9
        assert 1 / 0
    assert not hasattr(model, "attachment")
