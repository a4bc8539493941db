"""The ``freescale`` command.

main              entry point: ``freescale COMMAND``, with the list of commands
__main__          the same for ``python -m lightning_freescale.cli``
demo              ``freescale demo``: trains an HSTU with the baseline and with FreeScale
demo_callbacks    callbacks of the demo
demo_output       what the demo prints
plan              ``freescale plan``: what balancing would gain on the user's data
history_lengths   reads the lengths of the histories for ``plan``
balance_outcomes  loads of the ranks under each mode of balancing, for ``plan``
forecast          simulated step times for ``plan``
id_plan           ``freescale plan --ids``: rows and eviction of a table with zero-collision ids
report            ``freescale report``: where the time of a run went
report.html       template of the report's page
doctor            ``freescale doctor``: what is installed, which transport fits, what to fix
recommend         ``freescale recommend``: writes the best items of every user
evaluate          ``freescale evaluate``: ranks the last event of every user
serve             ``freescale serve``: answers requests over HTTP
trained_model     a trained HSTU from a checkpoint
dense_items       a checkpoint with zero-collision ids as one of an ordinary HSTU
recommender_files a trained model from a checkpoint or an exported file, for the three commands above
event_file_options the options with which the commands read a file of events
verify            ``freescale verify``: checks that checkpoints are undamaged
export            ``freescale export``: writes a checkpoint as one state dict
"""
