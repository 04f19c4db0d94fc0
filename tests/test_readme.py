"""The README's claims table and the tests name the same claims; its commands and snippets run as a reader types them."""
from concurrent.futures import ThreadPoolExecutor
import os
from pathlib import Path
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(?:python)?\n(.*?)```", README, re.S)
SNIPPETS = [block for block in BLOCKS if re.match("from |import ", block)]
COMMANDS = {line.split("  #")[0].strip(): None for block in BLOCKS for line in block.splitlines()
            if re.match("python |torchrun ", line)}
COMMANDS |= dict.fromkeys(re.findall("`(python -m [^`]+)`", README))
COMMANDS = [*COMMANDS, "pip install -r requirements.txt && python -m nanollm"]
SHORT = [  # what makes a long command a short one; the first that fits
    (" train", "--out {folder}/run --steps 1 --documents 2"), (" generate", "--tokens 3"),
    ("nanollm.speed", "--lengths 256 --new 2 --repeat 1"), ("methods.", ""), ("kernels.", "")]
COMPARE = "--documents 2 --lengths 256 --budgets 25 --json {folder}/rows.json --figure {folder}/compare.png"


def test_every_claim_in_the_readme_has_a_test_and_every_tested_claim_a_row():
    rows = re.findall(r"^\| ([STPCR]\d+) \|", README, re.M)
    marked = {claim for file in (ROOT / "tests").glob("*.py")
              for claim in re.findall(r'mark\.claim\("([STPCR]\d+)"\)', file.read_text())}
    assert rows and len(rows) == len(set(rows))
    assert set(rows) == marked


def test_verdicts_are_of_the_four_kinds_and_carry_a_number():
    table = re.findall(r"^\| [STPCR]\d+ \|.*$", README, re.M)
    for row in table:
        verdict = row.split("|")[3].strip()
        assert verdict in ("holds", "holds after a fix", "does not hold", "not testable here"), row
        assert re.search(r"\d", row.split("|")[4]), row


def test_files_that_the_readme_names_exist():
    names = re.findall(r"`((?:nanollm|methods|notebooks|tests)/[\w./]+)`", README)
    assert len(names) > 5
    for name in names:
        assert (ROOT / name).exists(), name


# ---- as a reader types them: a new process, from the root, with nothing but PATH and HOME in its environment ---


def in_a_clean_shell(*arguments) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(arguments, cwd=ROOT, env=dict(PATH=path, HOME=os.environ["HOME"]), capture_output=True, text=True,
                          timeout=300, stdin=subprocess.DEVNULL)


def shortened(command: str, folder: Path) -> list[str]:
    command = command.replace("FOLDER", str(folder / "checkpoint")).removeprefix("pip install -r requirements.txt && ")
    more = next((more for part, more in SHORT if part in command), COMPARE)
    if more == COMPARE and ("--methods" not in command or "--methods all" in command):
        more += " --methods full h2o"
    return shlex.split(command) + shlex.split(more.format(folder=folder))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Every command of the README, run: two at a time, as one does little but import."""
    folders = {command: tmp_path_factory.mktemp("command") for command in COMMANDS}
    for folder in folders.values():
        foreign_checkpoint(folder / "checkpoint")
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(COMMANDS, pool.map(lambda item: in_a_clean_shell(*shortened(*item)), folders.items())))


def foreign_checkpoint(folder: Path):
    """The shipped decoder with a tokenizer of Hugging Face's, of bytes alone, as any checkpoint may bring."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    shutil.copytree(ROOT / "nanollm" / "tiny", folder, ignore=shutil.ignore_patterns("tokenizer*", "train.json"))
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_readme_runs(done, command):
    run = done[command]
    if "kernels.bench" in command and "--predict" not in command and not torch.cuda.is_available():
        assert run.returncode == 2 and re.fullmatch("error: .*GPU.*\n", run.stderr), run.stderr
    else:
        assert run.returncode == 0 and run.stdout and "Traceback" not in run.stderr, run.stderr


def test_there_are_commands_to_run_and_every_snippet_is_checked():
    assert len(COMMANDS) > 12 and len(SNIPPETS) == len(CHECKS)


CHECKS = {  # a snippet's first word that no other has → what holds after it
    "class LongKeys": """
from nanollm.cache import finish_prompt, make_cache
from nanollm.model import Config, Decoder
import torch
model = Decoder(Config(vocab_size=50, max_len=64, n_layers=2, n_heads=4, n_kv_heads=2, d_model=32, d_ff=32))
caches = make_cache(model, variants["long_keys"], budget=5)
with torch.inference_mode():
    model(torch.arange(20)[None], caches)
    longest = caches[1].k.norm(dim=-1).topk(5).indices.sort().values
    finish_prompt(caches)
assert (caches[1].pos == longest).all()
""",
    "ChunkKV": "\nassert all(54 < cache.length - 20 <= 64 for cache in caches)\n",  # a chunk has ten tokens; 20 are new
    "decode_attention": "\nassert (y - F.scaled_dot_product_attention(q, k, v)).abs().max() < 1e-5\n",
    "SubGen4Cache": ""}


@pytest.mark.parametrize("name", CHECKS)
def test_a_snippet_of_the_readme_does_what_it_says(name):
    if name == "decode_attention":
        pytest.importorskip("triton")  # Linux only
    (code,) = (code for code in SNIPPETS if name in code)
    run = in_a_clean_shell("python", "-c", code + CHECKS[name])
    assert run.returncode == 0 and not run.stderr, run.stderr
    if name == "ChunkKV":
        assert " import system" in run.stdout
    if name == "decode_attention":
        assert run.stdout.count("4.") == 2
    if name == "SubGen4Cache":
        exact, estimate = (int(line.rsplit("(")[-1].split(",")[0]) for line in run.stdout.splitlines())
        assert estimate < exact / 2


def test_transformers_opens_the_shipped_weights():
    (call,) = re.findall(r"`(transformers\.AutoModelForCausalLM[^`]*)`", README)
    run = in_a_clean_shell("python", "-c", f"import transformers\nmodel = {call}\nprint(model.config.model_type)")
    assert run.returncode == 0 and run.stdout == "llama\n", run.stderr


def test_a_checkpoint_with_a_foreign_tokenizer_is_compared_or_says_why_not(tmp_path):
    foreign_checkpoint(tmp_path / "checkpoint")
    run = in_a_clean_shell(*shortened(f"python -m nanollm --model {tmp_path}/checkpoint", tmp_path))
    assert run.returncode in (0, 2) and "Traceback" not in run.stderr and run.stderr.count("\n") <= 1, run.stderr
