"""Sources of documents and tokenizers from files and from the Hugging Face hub."""
