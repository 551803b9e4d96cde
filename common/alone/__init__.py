"""One process alone with the user's objects: what they see of the world, and what they are given back."""
