"""A tiny GPT/Llama decoder with an explicit KV cache, and everything that measures what compressing it costs."""
