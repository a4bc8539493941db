"""Copies of the training state in the memory of two hosts, from which a restart resumes without a file system.

A copy is a checkpoint folder whose files are spread over the hosts. Each host has a folder in its memory. A rank writes its
shards there, and sends the same bytes to a rank on another host, which writes them to the folder of its own host. The files of
rank 0 include Lightning's part and all weights that are not in tables. Every host has the list of all files.

* ``options.py``: ``HostCopies``, and the name of the training.
* ``host_folder.py``: the folder of one host: copies are written, listed, checked and removed.
* ``hosts.py``: which ranks share a host, and which rank of another host keeps the files of a rank.
* ``file_exchange.py``: sends files between ranks, in parts.
* ``writing.py``: writes a copy. It runs in a thread, on a process group of its own.
* ``finding.py``: finds the newest complete copy, and fetches the files that this host lacks.
* ``hooks.py``: Lightning's hooks: when copies are made, chosen, loaded and removed.
"""
