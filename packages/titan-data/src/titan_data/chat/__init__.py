"""Chats and pairs of prompt and completion as training data: only what the assistant writes is a target."""
