"""Zero-collision ids (MPZCH, arXiv 2602.17050): every 64-bit id has a row of its own, and loses it when it is obsolete.

Catalogues have no ``0 .. rows - 1``. Their ids are 64-bit numbers, new ones appear and old ones are never seen again. A hash
modulo the rows lets ids share rows. Here an id *probes* for a free *slot* (a row number) and keeps it. An id that has not been
seen for long loses its slot to a new one, whose row is then drawn anew.

Files:

    layout.py       how the slots of a table are arranged, and when a slot is taken back
    reference.py    the definition, in plain Python
    remap.py        the same on tensors: look-ups, insertions, undo
    hashing.py      arithmetic of 64-bit integers without a sign, on tensors
    triton_remap.py the kernels for CUDA
    fresh_rows.py   the first row of an id
    module.py       the identities of one table, as a managed-collision module of TorchRec
    collection.py   ``zero_collision``: the options, and the collection before sharding
    sharded.py      the collection after sharding, and its synchronous step
    distinct_requests.py  what a rank requests with ``dedup``
    owned_table.py  this rank's part of one table: identities, rows, optimizer state
    ahead.py        batches whose ids are inserted before their own step (prioritized exchange)
"""
