"""Reads checkpoints of language models: Hugging Face folders and GGUF files, both as one `Checkpoint`."""
