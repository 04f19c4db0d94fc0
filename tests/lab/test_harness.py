"""Prompts of lm-evaluation-harness are compressed where their question begins."""

import pytest

from foreign import foreign_checkpoint

pytest.importorskip("lm_eval")  # optional

from lab.harness import Compressed


def test_the_full_cache_writes_what_the_model_writes_and_a_prompt_is_divided(tmp_path):
    folder = str(foreign_checkpoint(tmp_path))
    model = Compressed(folder, "full", context_end="What", device="cpu")
    known = "<s>One fact. What? It came."
    prompt = f"{known} What came?"
    ids = model.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    ids = ids.input_ids
    n = model.context_length(ids[0])
    assert model.tokenizer.decode(ids[0, :n]).strip() == known
    own = model.model.generate(ids, max_length=40, do_sample=False)
    assert model._model_generate(ids, 40, []).equal(own)
    model.context_end = ""
    assert model.context_length(ids[0]) == ids.shape[1]
