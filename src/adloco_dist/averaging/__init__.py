"""Pseudo-gradients over the wire and the outer step, on flat vectors; a library that needs torch alone."""
