// The index work of the prioritized exchange on a CPU: where each id of a batch lies at its owner, on the wire and at
// its requester. lightning_freescale/embedding/index.py defines the orders; index_triton.py has the same for CUDA.
//
// The ids of one feature and one requester are a segment: contiguous in lookup order and in wire order, in the same
// order. Two consecutive batches, A and B, are treated together: for each rank the marks of A travel first, then those
// of B. The memory of all arrays belongs to the caller. Nothing here depends on Python.
#pragma once

#include <cstdint>

namespace freescale::exchange_index {

using Int = std::int64_t;
using Mark = std::uint8_t;

struct Cluster {
  Int features, ranks, rank;
  Int segments() const { return features * ranks; }
};

// Where each segment starts. `lookup` has one more entry, the end.
struct Segments {
  const Int *lookup, *wire;
};

// Row keys and owner's wire order [n], requester's wire order [m]; batch position [m] if `unbucketize` is given.
void place(const Cluster& cluster, const Int* values, const Int* offsets, Int samples, const Int* sample_bounds,
           const Int* first_key, const Int* by_owner, const Int* unbucketize, Int* lookup, Int* wire, Int* keys,
           Int* owner_order, Int* requester_order, Int* batch_position);

// How many of the ids lie in each block of `block` rows, for `ranks` blocks. The ids are below `block * ranks`.
template <typename Id>
void count_owners(const Id* ids, Int count, Int block, Int ranks, Int* counts);

// Writes `stamp` to the rows of a batch.
void note(const Int* keys, Int count, Mark stamp, Mark* stamps);

// Which rows of a batch have `stamp`: to `collides` in lookup order, and to the wire: marks for other ranks to `sent`,
// which has `num_sent` entries, marks for this rank to `kept`. `shifts` is the distance of each rank's marks in the
// common transfer from those in the wire order of the batch.
void look(const Cluster& cluster, const Int* keys, Segments segments, const Int* shifts, const Mark* stamps, Mark stamp,
          Mark* collides, Mark* sent, Int num_sent, Mark* kept);

// One of the two batches, after its marks have arrived. The marks of `rank` begin at `received[start + shift]`.
struct Marked {
  const Mark *collides, *received;
  const Int *receive_start, *receive_end, *receive_shift;
};

// Sizes of both parts, as index.split_counts gives them: [2 W + 2 T].
void count(const Cluster& cluster, const Marked& batch, const Int* lookup, Int* counts);

// The rows of a batch, the collision rows first.
struct Divided {
  Int *values, *wire_order, *wire_position, *wire_ids;  // [n]
  Int *batch_position, *batch_order;                    // [m]
  Int* offsets;                                         // [2, T * B + 1]
};

void divide(const Cluster& cluster, const Marked& batch, const Int* values, const Int* offsets, Int num_lengths,
            const Int* lookup, const Int* counts, const Int* unbucketize, const Divided& out);

}  // namespace freescale::exchange_index
