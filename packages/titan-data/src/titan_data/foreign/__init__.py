"""Token ids that other tools wrote, read as they are. None of these formats records its tokenizer, so the recipe names
it."""
