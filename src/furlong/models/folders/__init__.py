"""Folders of models: what lies in them, built, read, filled and checked."""
