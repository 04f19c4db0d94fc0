"""Run lm-evaluation-harness with a compressed cache (pip install "lm-eval[hf]", optional).

    python -m lab.harness run --model compressed --tasks niah_single_1 --model_args \
        pretrained=FOLDER,method=kvzip,keep=0.125,context_end="What is the special magic"

The harness gives context and question in one prompt. `context_end` says how the question begins:
what comes before its last occurrence is compressed, and the rest is read from the compressed cache,
as NVIDIA/kvpress divides RULER. Without it the whole prompt is compressed, so the method knows the
question.
"""

from pathlib import Path

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from lab.loading import calibrated
from lab.methods_by_name import pick
from lab.questions import compressed
from nanollm.bridge import Bridged
from nanollm.checkpoint import hf_tokenizer


@register_model("compressed")
class Compressed(HFLM):
    """A model of transformers whose prompts are compressed before the answer is generated.

    keep: keep ratio, from 0 to 1. calibration: folder of what a method learns of the model.
    """

    def __init__(
        self,
        pretrained: str,
        method: str = "kvzip",
        keep: float = 0.125,
        context_end: str = "",
        calibration: str | None = None,
        **options,
    ):
        super().__init__(pretrained, **options)
        if self.batch_size != 1:
            raise ValueError(f"batch_size is {self.batch_size}; set it to 1")
        self.method = method
        self.keep = float(keep)
        self.context_end = context_end
        folder = calibration and Path(calibration)
        variant = pick([method])[method]
        encoding = hf_tokenizer(pretrained)
        self.learned = calibrated(variant, Bridged(self.model), encoding, folder)

    def context_length(self, ids: Tensor) -> int:
        """Return how many of the prompt's tokens (T,) come before the question."""
        end = self.tokenizer.decode(ids).rfind(self.context_end or "\0")
        n = len(ids)
        if end < 0 and self.context_end:
            raise ValueError(
                f"no {self.context_end!r} in a prompt; name its question's beginning"
            )
        if end <= 0:
            return n
        while len(self.tokenizer.decode(ids[:n])) > end:
            n -= 1
        return n

    def _model_generate(self, context: Tensor, max_length: int, stop, **options):
        known = context[:, : self.context_length(context[0])]
        with compressed(
            self.model, known, self.method, self.keep, **self.learned
        ) as memory:
            options["past_key_values"] = memory
            return super()._model_generate(context, max_length, stop, **options)

    def _loglikelihood_tokens(self, *_, **__):
        raise ValueError(
            "this model only generates; choose tasks of output_type generate_until"
        )


if __name__ == "__main__":
    cli_evaluate()
