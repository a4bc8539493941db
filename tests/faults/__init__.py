"""Trainings whose ranks are killed at random moments, and which are started again until they are complete.

``training``  the training of one rank: a small HSTU, a checkpoint every few steps, a record of every trained sample
``failures``  a rank that hangs, or whose memory is used up; an MPS server that dies
``output``    what each rank prints, and where its threads are if it is late
``attempt``   one start of all ranks; a rank is killed or fails, and the others are watched until they end
``checks``    named errors, no sample lost, equal weights, nothing left in memory
``campaign``  many trainings with random settings, several at the same time
``elastic``   the training under torchrun's agents, with a changing number of hosts

``python -m tests.faults --kills 100 --seed 0`` runs a campaign.
"""

import os

# Without it, a question for the GPUs initializes CUDA in this process, and forked ranks cannot use CUDA then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
