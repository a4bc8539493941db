"""Data whose next event depends on events long ago, and training and evaluation of models on such data.

* ``data.py``: generated histories and histories of a file, with the targets that are ranked.
* ``trial.py``: one training of an HSTU, and its HR@10 and NDCG@10.
* ``step_time.py``: the time of forward and backward.
"""
