"""A tiny GPT/Llama decoder with an explicit KV cache."""
from pathlib import Path
import signal
import sys

if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # `python -m nanollm…` starts: until `command` runs, Ctrl-C ends it silently, not amid torch's imports
    signal.signal(signal.SIGINT, signal.SIG_DFL)

TINY = Path(__file__).parent / "tiny"  # trained from a start that has the heads which retrieve
LEARNED = Path(__file__).parent / "tiny_learned"  # of the same shape; it learned to retrieve
SHIPPED = {"built": TINY, "learned": LEARNED}  # what tables call them
