"""Weights in the formats of others: Hugging Face, Meta and DCP; loading, converting, importing and exporting them."""
