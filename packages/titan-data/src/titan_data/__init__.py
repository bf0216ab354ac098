"""Datasets and tokenizers from local files and from the Hugging Face hub."""
