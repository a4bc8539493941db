#include "exchange_index.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace freescale::exchange_index {
namespace {

// Where the elements of each rank start if this rank comes last.
std::vector<Int> own_last(const std::vector<Int>& counts, Int rank) {
  std::vector<Int> starts(counts.size());
  Int place = 0;
  for (std::size_t peer = 0; peer < counts.size(); ++peer) {
    starts[peer] = place;
    if (static_cast<Int>(peer) != rank) place += counts[peer];
  }
  starts[rank] = place;
  return starts;
}

}  // namespace

void place(const Cluster& cluster, const Int* values, const Int* offsets, Int samples, const Int* sample_bounds,
           const Int* first_key, const Int* by_owner, const Int* unbucketize, Int* lookup, Int* wire, Int* keys,
           Int* owner_order, Int* requester_order, Int* batch_position) {
  std::vector<Int> totals(cluster.ranks, 0);
  for (Int feature = 0; feature < cluster.features; ++feature)
    for (Int peer = 0; peer < cluster.ranks; ++peer) {
      const Int* row = offsets + feature * samples;
      lookup[feature * cluster.ranks + peer] = row[sample_bounds[peer]];
      totals[peer] += row[sample_bounds[peer + 1]] - row[sample_bounds[peer]];
    }
  lookup[cluster.segments()] = offsets[cluster.features * samples];
  std::vector<Int> on_wire = own_last(totals, cluster.rank);
  for (Int segment = 0; segment < cluster.segments(); ++segment) {
    Int& place = on_wire[segment % cluster.ranks];
    wire[segment] = place;
    const Int first = first_key[segment / cluster.ranks];
    for (Int id = lookup[segment]; id < lookup[segment + 1]; ++id) {
      keys[id] = values[id] + first;
      owner_order[place++] = id;
    }
  }
  Int request = 0, place = 0, own = 0;
  for (Int owner = 0; owner < cluster.ranks; ++owner) {
    if (owner == cluster.rank) own = request;
    for (Int i = 0; i < by_owner[owner]; ++i, ++request)
      if (owner != cluster.rank) requester_order[place++] = request;
  }
  for (Int i = 0; i < by_owner[cluster.rank]; ++i) requester_order[place++] = own + i;
  if (unbucketize != nullptr)
    for (Int id = 0; id < request; ++id) batch_position[unbucketize[id]] = id;
}

template <typename Id>
void count_owners(const Id* ids, Int count, Int block, Int ranks, Int* counts) {
  // A comparison for each owner, which compilers vectorize, takes less time than a division. A tile of ids stays in the cache.
  constexpr Int tile = 4096;
  std::fill(counts, counts + ranks, Int{0});
  counts[0] = count;
  for (Int start = 0; start < count; start += tile) {
    const Int end = std::min(count, start + tile);
    for (Int owner = 1; owner < ranks; ++owner) {
      const Int bound = owner * block;
      Int beyond = 0;
      for (Int i = start; i < end; ++i) beyond += static_cast<Int>(ids[i]) >= bound;
      counts[owner] += beyond;
    }
  }
  for (Int owner = 0; owner + 1 < ranks; ++owner) counts[owner] -= counts[owner + 1];
}

template void count_owners(const std::int64_t*, Int, Int, Int, Int*);
template void count_owners(const std::int32_t*, Int, Int, Int, Int*);

void note(const Int* keys, Int count, Mark stamp, Mark* stamps) {
  for (Int id = 0; id < count; ++id) stamps[keys[id]] = stamp;
}

void look(const Cluster& cluster, const Int* keys, Segments segments, const Int* shifts, const Mark* stamps, Mark stamp,
          Mark* collides, Mark* sent, Int num_sent, Mark* kept) {
  for (Int segment = 0; segment < cluster.segments(); ++segment) {
    Int there = segments.wire[segment] + shifts[segment % cluster.ranks];
    for (Int id = segments.lookup[segment]; id < segments.lookup[segment + 1]; ++id, ++there) {
      const Mark found = stamps[keys[id]] == stamp;
      collides[id] = found;
      (there < num_sent ? sent[there] : kept[there - num_sent]) = found;
    }
  }
}

void count(const Cluster& cluster, const Marked& batch, const Int* lookup, Int* counts) {
  const Int ranks = cluster.ranks, features = cluster.features;
  Int *by_requester = counts, *by_feature = counts + ranks, *all = by_feature + features, *by_owner = all + features;
  std::fill_n(counts, 2 * ranks + 2 * features, Int{0});
  for (Int segment = 0; segment < cluster.segments(); ++segment) {
    const Int start = lookup[segment], end = lookup[segment + 1];
    const Int marked = std::accumulate(batch.collides + start, batch.collides + end, Int{0});
    by_requester[segment % ranks] += marked;
    by_feature[segment / ranks] += marked;
    all[segment / ranks] += end - start;
  }
  for (Int owner = 0; owner < ranks; ++owner) {
    const Mark* first = batch.received + batch.receive_shift[owner];
    by_owner[owner] = std::accumulate(first + batch.receive_start[owner], first + batch.receive_end[owner], Int{0});
  }
}

void divide(const Cluster& cluster, const Marked& batch, const Int* values, const Int* offsets, Int num_lengths,
            const Int* lookup, const Int* counts, const Int* unbucketize, const Divided& out) {
  const Int ranks = cluster.ranks, *by_owner = counts + ranks + 2 * cluster.features;
  const Int owned_collisions = std::accumulate(counts, counts + ranks, Int{0});
  const Int requested_collisions = std::accumulate(by_owner, by_owner + ranks, Int{0});

  // owner: every id in lookup order. Part 0 are the collision rows, part 1 the exclusive rows.
  std::vector<Int> sizes[2] = {std::vector<Int>(counts, counts + ranks), std::vector<Int>(ranks, 0)};
  for (Int segment = 0; segment < cluster.segments(); ++segment)
    sizes[1][segment % ranks] += lookup[segment + 1] - lookup[segment];
  for (Int peer = 0; peer < ranks; ++peer) sizes[1][peer] -= counts[peer];
  std::vector<Int> on_wire[2] = {own_last(sizes[0], cluster.rank), own_last(sizes[1], cluster.rank)};
  const Int first_of_part[2] = {0, owned_collisions};
  Int in_part[2] = {0, 0};
  for (Int segment = 0; segment < cluster.segments(); ++segment)
    for (Int id = lookup[segment]; id < lookup[segment + 1]; ++id) {
      const int part = batch.collides[id] ? 0 : 1;
      const Int first = first_of_part[part], here = in_part[part]++, there = on_wire[part][segment % ranks]++;
      out.values[first + here] = values[id];
      out.wire_ids[first + there] = values[id];
      out.wire_order[first + there] = here;
      out.wire_position[first + here] = there;
    }

  // owner: every feature and sample
  Int collisions = 0;
  out.offsets[0] = out.offsets[num_lengths + 1] = 0;
  for (Int sample = 0; sample < num_lengths; ++sample) {
    for (Int id = offsets[sample]; id < offsets[sample + 1]; ++id) collisions += batch.collides[id];
    out.offsets[sample + 1] = collisions;
    out.offsets[num_lengths + 2 + sample] = offsets[sample + 1] - collisions;
  }

  // requester: every id in request order
  std::vector<Int> requested[2] = {std::vector<Int>(by_owner, by_owner + ranks), std::vector<Int>(ranks)};
  Int num_requested = 0;
  for (Int owner = 0; owner < ranks; ++owner) {
    const Int rows = batch.receive_end[owner] - batch.receive_start[owner];
    requested[1][owner] = rows - by_owner[owner];
    num_requested += rows;
  }
  std::vector<Int> arrives[2] = {own_last(requested[0], cluster.rank), own_last(requested[1], cluster.rank)};
  std::vector<Int> place_of_request(num_requested);
  Int request = 0;
  for (Int owner = 0; owner < ranks; ++owner) {
    const Mark* marks = batch.received + batch.receive_shift[owner];
    for (Int at = batch.receive_start[owner]; at < batch.receive_end[owner]; ++at, ++request) {
      const int part = marks[at] ? 0 : 1;
      place_of_request[request] = (part ? requested_collisions : 0) + arrives[part][owner]++;
    }
  }
  for (Int id = 0; id < num_requested; ++id) {
    const Int place = place_of_request[unbucketize == nullptr ? id : unbucketize[id]];
    out.batch_order[id] = place;
    out.batch_position[place] = id;
  }
}

}  // namespace freescale::exchange_index
