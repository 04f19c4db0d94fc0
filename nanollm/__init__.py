"""A tiny GPT/Llama decoder with an explicit KV cache, and everything that measures what compressing it costs."""
from pathlib import Path

TINY = Path(__file__).parent / "tiny"  # the trained checkpoint that ships
