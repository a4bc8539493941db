// bias.cuh on a CPU: one warp adds the bias to strips of scores and sums score gradients by bucket. The results are compared
// with plain loops in double precision. Prints the largest errors and how many strips took which path.
// usage: main TRIALS SHIFT; SHIFT is added to the edges of the buckets, for a negative control.
#include <cstdio>
#include <random>
#include <vector>

#include "bias.cuh"

using namespace bias;
constexpr u32 TABLES = 0, ROWS = 1024, PLACE = 2048, SUMS = 4096;  // in shared memory
constexpr int STRIPS = 6;
using Values = std::vector<float>;  // of a strip, [16][64]

int bucket(int distance, int size) {
  return min((int)(__float_as_uint((float)max(distance, 0) + 1.0f) >> 22) - 254, size - 1);
}

// A history: its times, a record for each 64 events, and 16 of its events, which are rows of strips.
struct History {
  std::vector<int> times;
  std::vector<std::vector<int>> records;
  int row;

  History(int kind, std::mt19937& rng) {
    std::uniform_real_distribution<double> uniform(0, 1);
    const int tiles = 2 + rng() % 200;
    i64 now = 0;
    for (int i = 0; i < 64 * tiles; i++) {
      const double u = uniform(rng);
      const i64 gaps[] = {(i64)std::exp(15 * u), (i64)(-3600 * std::log(1 - u)) + 1, 0, 3600};
      if (kind < 4) now = min<i64>(now + gaps[kind], (1 << 30) - 1);
      if (kind == 4) now = (i64)(rng() % 0x80000000u) - (1 << 30);              // in any order
      if (kind == 5) now = rng() % 2 ? (1 << 30) - 1 : -(1 << 30);              // the largest differences
      times.push_back((int)now);
    }
    for (int first = 0; first < 64 * tiles; first += 64) {
      std::vector<int> record(times.begin() + first, times.begin() + first + 64);
      const auto [least, most] = std::minmax_element(record.begin(), record.end());
      const int bounds[] = {first, first, *least, *most};
      record.insert(record.end(), bounds, bounds + 4);
      records.push_back(record);
    }
    row = 16 * (rng() % (4 * tiles));
  }
  int tile() const { return row / 64; }
};

int element_row(int i) { return threadIdx.x / 4 + i % 4 / 2 * 8; }
int element_column(int i) { return i / 4 * 8 + 2 * (threadIdx.x % 4) + i % 2; }

void load_record(const std::vector<int>& record) {
  __syncwarp();
  if (threadIdx.x == 0) memcpy(shared + PLACE, record.data(), RECORD_BYTES);
  __syncwarp();
}

// scores := scores / 2 + half of the bias.
template <bool QUERIES>
Buckets add_bias(const Strip<QUERIES>& strip, Values& scores) {
  const Buckets buckets = strip.buckets(PLACE);
  float mine[32];
  for (int i = 0; i < 32; i++) mine[i] = scores[64 * element_row(i) + element_column(i)];
  if (buckets.constant())
    for (float& x : mine) x = fmaf(x, 0.5f, strip.constant(buckets));
  else
    strip.template add<0>(mine, buckets, PLACE, 0.5f);
  for (int i = 0; i < 32; i++) scores[64 * element_row(i) + element_column(i)] = mine[i];
  return buckets;
}

void add_gradient(Gradient& gradient, const Strip<false>& strip, const Values& grads, Buckets buckets) {
  u32 packed[16];
  for (int i = 0; i < 16; i++) {
    const float* pair = &grads[64 * element_row(2 * i) + element_column(2 * i)];
    packed[i] = pack(pair[0], pair[1]);
  }
  gradient.begin(buckets);
  for (u32 pair : packed) gradient.running += unpack(pair).x + unpack(pair).y;
  if (!buckets.constant()) gradient.finish(strip, packed, buckets, PLACE);
}

struct Trial {
  History history;
  Values position, time;
  std::vector<int> edges, query_tiles, key_tiles;
  std::vector<Values> scores, grads, by_keys, by_queries;
  float sums[2 * SLOTS];
  std::vector<Buckets> seen;

  void lane(int number) {
    const Bias bias = {position.data(), time.data(), edges.data(), nullptr, nullptr, (int)position.size(), (int)time.size()};
    load_tables(TABLES, bias, number, 32);
    __syncwarp();
    const int* own = history.records[history.tile()].data();
    const Strip<false> keys = {TABLES, ROWS};
    keys.init(own, history.row);
    Gradient gradient{SUMS};
    gradient.clear();
    for (int n = 0; n < STRIPS; n++) {
      load_record(history.records[query_tiles[n]]);
      const Buckets buckets = add_bias(keys, by_keys[n]);
      add_gradient(gradient, keys, grads[n], buckets);
      if (number == 0) seen.push_back(buckets);
    }
    gradient.flush();
    __syncwarp();
    for (int i = number; i < 2 * SLOTS; i += 32) sums[i] = Gradient::total(SUMS, i);
    __syncwarp();
    const Strip<true> queries = {TABLES, ROWS};
    queries.init(own, history.row);
    for (int n = 0; n < STRIPS; n++) {
      load_record(history.records[key_tiles[n]]);
      add_bias(queries, by_queries[n]);
    }
  }

  double expected(float score, int query, int key) const {
    const auto& t = history.times;
    return 0.5 * score + 0.5 * position[bucket(query - key, (int)position.size())] +
           0.5 * time[bucket(t[query] - t[key], (int)time.size())];
  }

  // Largest errors of a score, and of a sum relative to the sum of all magnitudes.
  std::pair<double, double> errors() const {
    double score = 0, all = 0, sum = 0, want[2 * SLOTS] = {};
    for (int n = 0; n < STRIPS; n++)
      for (int i = 0; i < 16 * 64; i++) {
        const int own = history.row + i / 64, query = 64 * query_tiles[n] + i % 64, key = 64 * key_tiles[n] + i % 64;
        if (query >= own) score = max(score, std::abs(expected(scores[n][i], query, own) - by_keys[n][i]));
        if (key <= own) score = max(score, std::abs(expected(scores[n][i], own, key) - by_queries[n][i]));
        want[bucket(query - own, (int)position.size())] += grads[n][i];
        want[SLOTS + bucket(history.times[query] - history.times[own], (int)time.size())] += grads[n][i];
        all += std::abs(grads[n][i]);
      }
    for (int i = 0; i < 2 * SLOTS; i++) sum = max(sum, std::abs(want[i] - sums[i]) / all);
    return {score, sum};
  }
};

Trial make_trial(int number, int shift, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  const int positions[] = {1, 5, 64, 33}, times[] = {3, 63, 63};
  Trial trial{History(number % 6, rng)};
  for (int i = 0; i < positions[number % 4]; i++) trial.position.push_back(normal(rng));
  for (int i = 0; i < times[number % 3]; i++) trial.time.push_back(normal(rng));
  for (int b = 0; b < SLOTS; b++) {
    i64 low = 0, high = 0x7fffffff;
    while (low < high) {
      const i64 middle = (low + high) / 2;
      if (bucket((int)middle, 1 << 20) >= b)
        high = middle;
      else
        low = middle + 1;
    }
    trial.edges.push_back(saturated(low + shift));
  }
  const int tile = trial.history.tile(), last = (int)trial.history.records.size() - 1;
  for (int n = 0; n < STRIPS; n++) {
    trial.query_tiles.push_back(last - (last - tile) * n / (STRIPS - 1));
    trial.key_tiles.push_back(tile * n / (STRIPS - 1));
    Values scores, grads;
    for (int i = 0; i < 16 * 64; i++) {
      const bool later = 64 * trial.query_tiles[n] + i % 64 >= trial.history.row + i / 64;
      scores.push_back(normal(rng));
      grads.push_back(later ? unpack(pack(normal(rng), 0)).x : 0.0f);  // exact in bf16
    }
    trial.scores.push_back(scores);
    trial.grads.push_back(grads);
  }
  trial.by_keys = trial.by_queries = trial.scores;
  return trial;
}

int main(int, char** arguments) {
  std::mt19937 rng(7);
  double score = 0, sum = 0;
  int paths[5] = {};  // constant bias; one edge of positions; of times; of both; more
  for (int number = 0; number < atoi(arguments[1]); number++) {
    Trial trial = make_trial(number, atoi(arguments[2]), rng);
    block::run(32, [&] { trial.lane(threadIdx.x); });
    const auto found = trial.errors();
    score = max(score, found.first);
    sum = max(sum, found.second);
    for (Buckets b : trial.seen) {
      const int p = b.position_high() - b.position_low(), t = b.time_high() - b.time_low();
      paths[p > 1 || t > 1 ? 4 : p + 2 * t]++;
    }
  }
  printf("{\"score\": %g, \"sum\": %g, \"paths\": [%d, %d, %d, %d, %d]}\n", score, sum, paths[0], paths[1], paths[2],
         paths[3], paths[4]);
}
