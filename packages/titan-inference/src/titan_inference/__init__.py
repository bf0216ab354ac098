"""Text generation with the models that Titan trains."""
