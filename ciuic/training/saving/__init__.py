"""Saves from the moment they are due until they are staged and handed to the writer."""
