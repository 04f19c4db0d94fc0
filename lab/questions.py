"""Read a text with a model of transformers, and go on from its compressed cache.

    with compressed(model, ids, "kvzip", keep=0.125) as memory:
        model.generate(longer_ids, past_key_values=memory)  # they begin with ids

    answers = ask(model, tokenizer, text, ["Who came?", "When?"], "kvzip", keep=0.125)

A keep ratio of 12.5 % is what NVIDIA/kvpress calls a compression_ratio of 0.875. The budget
includes the entries of an observation window.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor
from tqdm import tqdm

from lab.methods_by_name import pick
from lab.retrieval import budget_for
from nanollm.bridge import Bridged, attach, detach
from nanollm.check import check_tokens
from nanollm.foreign_layers import device_of
from nanollm.memory import Memory

QUESTION = "the question"  # stands for it in a chat template


@contextmanager
@torch.no_grad()
def compressed(
    model, tokens: Tensor, method: str = "kvzip", keep: float = 0.125, **options
) -> Iterator[Memory]:
    """Yield a memory that has read tokens (1, T) and compressed them.

    Afterwards the model has its own attention again, unless it was attached before.

    keep: keep ratio, above 0 and at most 1. options: of the method. ValueError if the name or an
    option is wrong, or the method needs what it learns of a model (give that as an option).
    """
    check_tokens(tokens)
    if not 0 < keep <= 1:
        raise ValueError(f"keep is {keep}; it must be above 0 and at most 1")
    variant = pick([method])[method]
    options = variant.given(budget=budget_for(keep, tokens.shape[1])) | options
    attached_before = Bridged(model).attached
    memory = attach(model, variant.kind, variant.store, **options)
    try:
        for part in tqdm(tokens.split(512, 1), "reading", leave=False, disable=None):
            model(part, past_key_values=memory, logits_to_keep=1)
        memory.compress(tokens)
        yield memory
    finally:
        if not attached_before:
            detach(model)


@torch.no_grad()
def ask(
    model,
    tokenizer,
    text: str,
    questions: list[str],
    method: str = "kvzip",
    keep: float = 0.125,
    new: int = 48,
    **options,
) -> list[str]:
    """Return an answer to each question, of at most `new` tokens, by greedy decoding.

    The text is read once for all questions (KVzip rereads it). ValueError if the chat template does
    not show what it is given.
    """
    if isinstance(questions, str):
        raise ValueError("questions are one text; give a list of them")
    before, after = f"{text}\n\n", "\n\n"
    if tokenizer.chat_template:
        chat = [dict(role="user", content=f"{text}\n\n{QUESTION}")]
        whole = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        before, found, after = whole.rpartition(QUESTION)
        if not found:
            raise ValueError("the chat template does not show the user's words")

    def encoded(part, special):
        ids = tokenizer(part, add_special_tokens=special, return_tensors="pt").input_ids
        if special and ids[0, -1] == tokenizer.eos_token_id:  # the text goes on
            ids = ids[:, :-1]
        return ids.to(device_of(model.get_input_embeddings().weight))

    context = encoded(before, not tokenizer.chat_template)
    asked = [encoded(question + after, False) for question in questions]
    answers = []
    with compressed(model, context, method, keep, **options) as memory:
        for end in asked:
            prompt = torch.cat((context, end), 1)
            written = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                past_key_values=deepcopy(memory),
                max_new_tokens=new,
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                cache_implementation=None,
            )
            own = written[0, prompt.shape[1] :]
            answers.append(tokenizer.decode(own, skip_special_tokens=True).strip())
    return answers
