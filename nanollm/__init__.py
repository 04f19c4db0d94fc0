"""A tiny GPT/Llama decoder with an explicit KV cache."""

from pathlib import Path
import signal
import sys

if (
    sys.argv[0] == "-m"
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    # `python -m nanollm…` is starting: Ctrl-C during torch's imports should end it without a
    # traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

TINY = Path(__file__).parent / "tiny"  # its initial weights already had retrieval heads
# of the same shape; it learned its retrieval heads
LEARNED = Path(__file__).parent / "tiny_learned"
SHIPPED = {"built": TINY, "learned": LEARNED}  # their names in tables
