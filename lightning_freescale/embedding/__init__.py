"""Sharded embedding tables, and the exact prioritized exchange of their rows between ranks.

Each rank *owns* a part of every table. In a step, a rank *requests* the rows of its batch from their owners, and returns the
gradients of these rows to them. TorchRec does this synchronously: the model waits for both all-to-alls. The prioritized exchange
hides them behind the dense compute and gives the same result, on a CPU bit for bit. Rows that batch N+1 does not share with
batch N (*exclusive rows*) travel while batch N computes. Only rows that both batches use (*collision rows*) wait for the update
by batch N.

Where to start: ``reference_step.py`` is the whole step as straight-line code over plain tensors. ``schedule.py`` has the same
step as it runs, with a picture of its order.

The flow of one batch, and the file of each part:

    request        send the ids to the owners                        prioritized.py
    route          who requests which rows from whom?                prioritized.py, index.py
    find           which rows collide with the neighbours?           collisions.py
    plan_rows      divide the rows: collision, exclusive             collisions.py, index.py
    send_rows      read the rows, send them to the requesters        local_tables.py, all_to_all.py
    join           put them together: the module's output            prioritized.py
    expect         divide the gradients in the same way              gradient_return.py
    hand_over      autograd delivers them, they leave                gradient_return.py
    apply          the owners update their rows                      gradient_return.py, local_tables.py

Files:

    zero_collision/     tables whose ids are any 64-bit numbers
    plan.py             the sharding plan: which rank holds which part of which table
    user_plan.py        a plan that the user or TorchRec's planner has made
    support.py          which tables can be exchanged prioritized, and why others cannot
    shard.py            shards a model by that plan; the dense parameters become data parallel
    fixed_buckets.py    the data parallelism of the dense parameters on a CPU, equal to the bit after a resume
    batched_copies.py   the same on a GPU: the gradients of a bucket are copied in one launch
    gradient_buckets.py the size of the buckets of the dense gradients on a GPU, chosen by a measurement
    table_optimizer.py  the fused optimizer of the tables: options, state, step counts, learning rate
    moment_kernel.py    Adam and LAMB on a CPU, where FBGEMM has no kernel for them
    index.py            index arithmetic as pure functions, and the names of the row orders
    fused_index.py      the same arithmetic in a few calls
    triton_index.py     these calls on CUDA, and index_triton.py their kernels
    cpp_index.py        these calls on a CPU
    index_results.py    what they return
    stages.py           the stages of a batch as types; the operations take one stage and return the next
    id_exchange.py      the exchange of the ids of row-wise tables
    owner_counts.py     how many ids each rank owns, counted in host memory
    announced_ids.py    these numbers in the header of a batch
    key_order.py        keeps the order of the features of a collection
    all_to_all.py       the transfer itself
    wire.py             the type of rows and gradients while they travel
    distinct_ids.py     ``dedup``: each distinct row travels once
    local_tables.py     the rows that this rank owns: read and update
    row_update.py       the update of rows without FBGEMM's look-up before it
    grouped_update.py   the update after a sort of the gradients, and adagrad_triton.py its kernels
    collisions.py       finds the collisions of two batches, and divides a batch by them
    gradient_return.py  the way of a gradient from autograd to the table
    prioritized.py      the operations on one module, from ids to output
    held_gradients.py   gradient accumulation: the gradients of the tables wait for the last micro-batch
    bag_tables.py       bags: the owner pools the rows of a sample before it sends them
    prioritized_bags.py the operations on one module of bags
    partial_sums.py     row-wise bags: the requester adds the sums of all ranks
    row_stats.py        counts of ids, rows, collisions and bytes
    schedule.py         the order of the operations in a step
    scheduled_module.py the part of one module in it, and why it may stay synchronous
    backward_count.py   sees backwards through a look-up, and finds models that run several of them
    table_watch.py      finds user code that changes tables between two steps
    direct_use.py       finds user code that uses the weights of a sharded table as a tensor
    mapped_ids.py       models that make rows of the ids of their batches themselves
    aliases.py          collections that a model refers to by several names
    unsharded_api.py    lets a sharded collection be used like the unsharded one
    mean_pooling.py     bags that TorchRec would divide wrongly
    output_order.py     the features of its output have the order of the unsharded one
    mode_trial.py       measures synchronous and prioritized steps (``prioritize="auto"``)
    mode_review.py      when to measure again
    exchange_mode.py    decides between synchronous and prioritized steps, and makes the process groups
    reference_step.py   the step as straight-line code, for readers and tests
"""
