"""Text for masked language modelling: documents, their tokens on disk, and what of them an example is.

documents.py, embedded.py   where text comes from
wordpiece.py, training.py   text to the numbers of tokens
corpus.py                   the tokens of all documents, on disk, made once
examples.py, masking.py     one example, a function of (seed, epoch, index)
pretraining.py, batches.py  the whole, and its batches
"""
