"""Files of other programs: data sets for the source `tags`, label masks for labeling tools, maps and logits.

Import the modules: each loads only the libraries of its format, and `map_files` is imported by every command.
"""
