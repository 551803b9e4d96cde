"""Conversations, perhaps with images, or as pairs of a preferred and a rejected one; and the models for them."""
