"""A comparison as one JSON document, and the pages made from it."""
