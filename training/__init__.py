"""Parts of the loop that are neither device, model nor choice of a recipe."""
