"""Rows, prompts in a reproducible order, and their splits.

A file is read once, row by row (`data/row_files.py`), and each row becomes one record of an array: content id,
question hash, length and the place in the file (`data/row_table.py`). Split, duplicates, limits of length, digest and
order are computed from that array alone (`data/row_split.py`), so they are the same for rows in memory and rows on
disk. For a file above `index_above_mb` the array is stored in the cache folder and rows are read when they are used;
on later starts 64 rows are read again to see that the tokenizer is the same. Of several sources, position p takes its
row from the source that p's point of a Weyl sequence falls on: any step has the configured shares, and a resumed run
needs only the step's number.
"""
