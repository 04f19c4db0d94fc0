"""A playground for notebooks: choose text, question and method; see what is kept and answered.

    Playground(*load(TINY, "cpu"))    # as the last line of a cell
"""
from html import escape

import ipywidgets as widgets
import torch
from torch import Tensor

from nanollm.cache import bytes_in_16_bits, make_cache
from nanollm.commands.demo import (NEW, PAGE, QUESTION, SETTINGS, answer, check_length, compressed, pieces,
                                   prompt)
from nanollm.commands.registry import calibrated, given, has_budget, one_line, pick
from nanollm.measure.evaluate import budget_for


class Playground(widgets.VBox):
    """Compress the text and answer the question, again after each change. Errors appear in it."""

    def __init__(self, model, encoding):
        self.model, self.encoding, self.methods = model, encoding, pick(["all"])
        self.learned = {}   # by method: the options that it measured on the decoder
        self.expected = {}  # by tokens of text and question: the full cache's answer and bytes
        wide = widgets.Layout(width="98%")
        self.text = widgets.Textarea(PAGE, layout=widgets.Layout(width="98%", height="9em"),
                                     continuous_update=False)
        self.question = widgets.Text(QUESTION.strip("\n"), description="question", layout=wide,
                                     continuous_update=False)
        self.method = widgets.Dropdown(options=[*self.methods], value="snap_kv", description="method")
        self.setting = widgets.ToggleButtons(options=[*SETTINGS], tooltips=[*SETTINGS.values()])
        self.budget = widgets.IntSlider(8, 1, 100, description="keep, %", continuous_update=False)
        self.window = widgets.IntSlider(8, 1, 64, description="window", continuous_update=False)
        layers = ["all", *map(str, range(model.config.n_layers))]
        self.layer = widgets.Dropdown(options=layers, description="layer")
        self.said, self.kept = widgets.HTML(layout=wide), widgets.HTML(layout=wide)
        rows = (self.method, self.setting), (self.budget, self.window, self.layer)
        super().__init__([self.text, self.question, *map(widgets.HBox, rows), self.said, self.kept])
        for control in (self.text, self.question, *rows[0], *rows[1]):
            control.observe(lambda change: self.show(), "value")
        self.show()

    def show(self):
        name, Method = self.method.value, self.methods[self.method.value]
        self.budget.disabled = not has_budget(Method)
        self.window.disabled = not given(Method, window_size=1)
        self.said.value, self.kept.value = "reading …", ""
        try:
            if name not in self.learned:
                self.learned[name] = calibrated(Method, self.model, self.encoding)
            self.said.value, self.kept.value = self.read(Method, self.learned[name])
        except Exception as error:  # any error, for a browser shows no traceback
            self.said.value = f"<b>{escape(one_line(error))}</b>"

    @torch.no_grad()
    def read(self, Method, options: dict) -> tuple[str, str]:
        """Return two pieces of HTML: the answer, and the text; a token is darker if more heads keep it."""
        model = self.model
        tokens, cuts = prompt(model, self.encoding, self.text.value, f"\n{self.question.value}")
        cut = cuts[self.setting.value]
        check_length(model, self.text.value, tokens)
        budget = budget_for(self.budget.value / 100, cuts["agnostic"])
        options = options | given(Method, budget=budget, window_size=self.window.value)
        caches, kept, written = compressed(model, self.encoding, Method, options, tokens, cut)
        key = tuple(tokens[0].tolist())
        if key not in self.expected:
            full = make_cache(model)
            self.expected[key] = answer(model, tokens, cut, full, NEW)[1], bytes_in_16_bits(full)
        expected, most = self.expected[key]
        if self.layer.value != "all":
            kept = kept[int(self.layer.value)][None]
        shares, size = kept.float().mean((0, 1)), bytes_in_16_bits(caches)

        own, full = (escape(self.encoding.decode(x).strip()) for x in (written, expected))
        said = (f"It answers <b>{own}</b>, the full cache <b>{full}</b>. After the answer its cache holds "
                f"<b>{size / 1024:.0f} KiB</b> with 16-bit numbers, {100 * size / most:.0f} % of the full "
                f"cache's {most / 1024:.0f} KiB. On average a head keeps {100 * shares.mean():.0f} % of the "
                f"{cut} compressed tokens; {int((shares == 0).sum())} tokens are evicted from all heads"
                f"{'' if self.layer.value == 'all' else f' of layer {self.layer.value}'}.")
        return said, self.shaded(tokens[0], shares)

    def shaded(self, tokens: Tensor, shares: Tensor) -> str:
        """Return tokens (T,) as HTML; a compressed token is as dark as the root of its share."""
        text = ""
        for i, piece in enumerate(pieces(self.encoding, tokens.tolist())):
            dark = 0.7 * float(shares[i]) ** 0.5 if i < len(shares) else None
            look = f"background:rgba(0,114,178,{dark:.2f})" if dark else "color:#aaa"
            look = "color:#007a3d" if dark is None else look  # came after the compression
            text += f'<span style="{look}">{escape(piece)}</span>'
        return ('<div style="white-space:pre-wrap;font-family:monospace;line-height:1.5;color:black;'
                f'background:white;padding:6px">{text}</div>')
