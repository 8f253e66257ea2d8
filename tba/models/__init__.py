"""Models: their places, loading, LoRA, and what makes them faster."""
