"""Data parallelism over zones with slow links between them."""
