"""Conversations, perhaps with images or in pairs of which one is preferred; and the models that hold them."""
