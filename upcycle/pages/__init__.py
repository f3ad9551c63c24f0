"""Numbers and single HTML pages for whoever shows results."""
