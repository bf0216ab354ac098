"""Cross entropy with a penalty on the softmax normaliser."""
