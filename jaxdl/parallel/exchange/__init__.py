"""Weights that are exchanged, rather than gradients that are summed: a token ring, and a master with workers.

Everything is a pure function of trees of arrays, so that the form within one compiled program and the form
between processes say the same.

tree.py      sums and multiples of trees
ring.py      a token that goes round and is always the newest
master.py    a master that workers send their updates to
compression.py   smaller updates, of which nothing is lost
spmd.py      the form within one compiled program
wire.py peers.py   trees as bytes, and sockets between processes
ring_process.py master_process.py   the form between processes, which may die or join
"""
