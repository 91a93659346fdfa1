"""Text: documents, their tokens on disk, and what of them an example is; labelled texts and questions.

documents.py, embedded.py   where text comes from
wordpiece.py, training.py   text to the numbers of tokens
corpus.py                   the tokens of all documents, on disk, made once
examples.py, masking.py     one example, a function of (seed, epoch, index)
pretraining.py              the whole
rows.py, labelled.py        texts with classes, from files of rows
squad.py                    questions, passages and answers
sources.py, batches.py      what a configuration names, and its batches
"""
