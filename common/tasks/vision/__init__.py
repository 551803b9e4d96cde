"""Datasets of images, each with a class."""
