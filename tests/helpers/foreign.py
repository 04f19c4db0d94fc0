"""Shape of small transformers models; a checkpoint whose family and tokenizer are not ours."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
import torch
import transformers as hf

from lab import corpus

V = 97  # ids
SHAPE = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
KINDS = {
    "bytes": (
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        trainers.BpeTrainer,
        dict(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    ),
    "unigram": (
        models.Unigram(),
        pre_tokenizers.Metaspace(),
        decoders.Metaspace(),
        trainers.UnigramTrainer,
        dict(unk_token="<unk>"),
    ),
}


def same(x, expected, atol=1e-5):
    torch.testing.assert_close(x, expected, atol=atol, rtol=0)


def foreign_checkpoint(folder, kind="bytes", **other):
    """Save a tiny random Qwen3 and a tokenizer trained here; return the folder.

    `from_hf` does not read this family. other: options of its configuration.
    """
    model, pre, decoder, Trainer, more = KINDS[kind]
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoder
    trainer = Trainer(
        vocab_size=1500,
        special_tokens=["<s>", "</s>", "<unk>"],
        show_progress=False,
        **more,
    )
    tokenizer.train_from_iterator(corpus.text("test")[::4], trainer)
    if kind == "bytes":  # the other one names BOS, and does not use it
        tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", 0)]
        )
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)

    options = dict(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**options | other))
    model.save_pretrained(folder)
    return folder
