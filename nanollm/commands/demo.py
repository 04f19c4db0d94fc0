"""Show what a cache keeps of a page, and what it answers: python -m nanollm generate, without a text."""
import os
import sys

import torch
from torch import Tensor

from nanollm.cache import make_cache
from nanollm.generate import end_prompt, tell_chunk_ends
from nanollm.measure.evaluate import feed, held
from nanollm.tokenizer import boundaries, opening

PAGE = """\
In the lighthouse stand four boxes, and on the lid of each something is painted: a star, a table, a
cookie and a building. The keeper wrote their numbers into his diary, where they stand between the
weather and the ships. In January the wind came from the north for nine days, and no boat left the
harbour. The code of star is 6098. He read by the lamp in the evening and mended the nets that the
last storm had torn. When the ice broke, two ships passed within an hour; one of them was carrying
timber, the other coal and letters. The code of table is 2356. In spring the stairs were painted,
which took longer than he had expected, since every step has to dry before the next one can be
reached. The code of cookie is 7623. Visitors came in May and asked how far the light can be seen.
On a clear night it is about twenty miles, and less than one when there is fog, which is why there
is a horn as well. The glass is cleaned each morning with a soft cloth. The code of building is
4490. He wrote little in summer. The nights are short then, and the lamp has to burn for only a few
hours; so he slept, and counted the birds."""
QUESTION = "\nQ: The code of table is "
FACT, ANSWER = " The code of table is 2356.", "2356"
METHOD, BUDGET = "snap_kv", 32  # it finds the fact if it knows the question, and else does not

SETTINGS = {"aware": "the question is part of the prompt that is compressed",
            "agnostic": "the page is compressed, then the question comes"}


def prompt(model, encoding, page: str, question: str) -> tuple[Tensor, dict[str, int]]:
    """Return the tokens (1, T) of page and question, and how many of them are compressed in each setting.

    The last token is fed after the compression in both.
    """
    context = opening(encoding, model.config) + encoding.encode_ordinary(page)
    tokens = context + encoding.encode_ordinary(question)
    cuts = dict(aware=len(tokens) - 1, agnostic=len(context))
    return torch.tensor([tokens], device=model.embed.weight.device), cuts


@torch.no_grad()
def answer(model, tokens: Tensor, cut: int, caches: list, new: int) -> tuple[Tensor, list[int]]:
    """Compress the first `cut` of tokens (1, T), read the rest one by one and write the `new` likeliest.

    Returns which of the first `cut` tokens each head held right after the compression, (L, H, cut), and the
    new tokens.
    """
    feed(model, tokens[:, :cut], caches)
    end_prompt(model, tokens[:, :cut], caches)
    kept, written = held(caches, cut)[0], []
    for token in tokens[:, cut:].unbind(1):
        logits = model(token[:, None], caches)
    for _ in range(new):
        written.append(logits[0, -1].argmax().item())
        logits = model(torch.full_like(tokens[:, :1], written[-1]), caches)
    return kept, written


def marked(encoding, tokens: list[int], gone: list[bool], dim: bool) -> str:
    """The text of tokens, those that are gone dimmed, or in [brackets] where a terminal cannot."""
    before, after = ("\033[2m", "\033[0m") if dim else ("[", "]")
    text, start = "", 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or gone[end] != gone[start]:
            run = encoding.decode(tokens[start:end])
            text += f"{before}{run}{after}" if gone[start] else run
            start = end
    return text


def demonstrate(model, encoding, name: str, Method, options: dict, figure=None):
    """Print the page as a method keeps it, aware and agnostic, and its answers beside the full cache's.

    figure: a file, for the page with each token as dark as the share of heads that keep it.
    """
    (tokens, cuts), new = prompt(model, encoding, PAGE, QUESTION), len(encoding.encode_ordinary(ANSWER))
    _, expected = answer(model, tokens, cuts["aware"], make_cache(model), new)
    ends = boundaries(encoding, model.config.vocab_size)[tokens.cpu()]
    dim = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    panels = {}
    for setting, cut in cuts.items():
        caches = make_cache(model, Method, **options)
        tell_chunk_ends(caches, ends[:, :cut])
        kept, written = answer(model, tokens, cut, caches, new)
        shares = kept.float().mean((0, 1)).tolist() + [1.0] * (tokens.shape[1] - cut)
        gone = [share == 0 for share in shares]
        told, full = encoding.decode(written), encoding.decode(expected)
        panels[f"{setting}: {SETTINGS[setting]}; {name} answers {told}, the full cache {full}"] = shares

        print(f"{setting}: {SETTINGS[setting]}\n\n{marked(encoding, tokens[0].tolist(), gone, dim)}\n")
        print(f"{sum(gone)} of {cut} tokens evicted, {'dimmed' if dim else 'in [brackets]'}: no head of any "
              f"layer has a slot for them; a head holds {100 * kept.float().mean():.0f} % of the tokens")
        print(f"the full cache answers {full}, {name} {told}; the page says {ANSWER}\n", flush=True)

    if figure:  # the page once a setting, the fact that is asked for underlined
        from nanollm.commands import plot
        after = encoding.encode_ordinary(PAGE.partition(FACT)[2])
        end = cuts["agnostic"] - len(after)
        start = end - len(encoding.encode_ordinary(FACT))
        fact = [start <= i < end for i in range(tokens.shape[1])]
        picture = plot.text([encoding.decode([token]) for token in tokens[0].tolist()], panels, fact,
                            low="kept by no head", mark="the fact asked for", width=120)
        plot.save(picture, figure)
