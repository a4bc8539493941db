"""An emulated device and network, so that exchanges can be measured without a GPU and without a slow link.

The rows and gradients that travel are real, and gloo moves them. Only time is emulated.

- ``clock``: virtual time, which is the same on every machine, or real time.
- ``network``: a process group whose all-to-alls take as long as on a link with a given bandwidth and latency.
- ``realtime_network``: the same in real time, for timelines.
- ``device``: an emulated device that computes by letting time pass.
"""
