"""Images: files and records to RGB arrays, what is done to one at random, and batches of them.

types.py            a picture, an example and a source
decode.py           an encoded image, whatever its format, to its pixels
sources/            where images come from
transforms.py       what happens to one image
augmentations.py    the random changes that it chooses from
mixing.py           the random mixing of two images of a batch
batches.py          the order of examples, and their batches
normalize.py        what happens to a batch inside the compiled step
prepare/            any source, written as a TFDS data set
"""
