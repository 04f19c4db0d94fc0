"""A GPT-2/Llama decoder with an explicit KV cache, and two small trained ones."""

from pathlib import Path

# two decoders of one shape
TINY = Path(__file__).parent / "tiny"  # its initial weights already had retrieval heads
LEARNED = Path(__file__).parent / "tiny_learned"  # it learned its retrieval heads
SHIPPED = {"built": TINY, "learned": LEARNED}  # their names in tables
