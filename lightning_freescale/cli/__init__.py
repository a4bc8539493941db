"""The ``freescale`` command.

main              entry point: ``freescale COMMAND``, with the list of commands
demo              ``freescale demo``: trains an HSTU with the baseline and with FreeScale
demo_callbacks    callbacks of the demo
demo_output       what the demo prints
plan              ``freescale plan``: what balancing would gain on the user's data
history_lengths   reads the lengths of the histories for ``plan``
balance_outcomes  loads of the ranks under each mode of balancing, for ``plan``
forecast          simulated step times for ``plan``
report            ``freescale report``: where the time of a run went
report.html       template of the report's page
doctor            ``freescale doctor``: what is installed, which transport fits, what to fix
export            ``freescale export``: writes a checkpoint as one state dict
"""
