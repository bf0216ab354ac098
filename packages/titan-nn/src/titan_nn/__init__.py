"""A library for model families: decoder blocks, rotary positions, experts, and layouts of such models. Registers nothing."""
