// silu.cuh on a CPU: the gradients of the inputs of a SiLU and their sums over the rows, compared with plain loops in double
// precision. Prints the largest relative error of a gradient and the largest error of a sum.
// usage: main SHIFT; SHIFT is added to the inputs that the plain loops see, for a negative control.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "silu.cuh"

constexpr int HEADS = 3, TILE = BACKWARD_ROWS, PROGRAMS = 2;
constexpr float SCALE = 0.25f;

struct Reference {
  std::vector<u16> before, grad;
  std::vector<float> shares;
  std::vector<double> want;
  int width, stride;
};

double slope(double x) {
  const double sigmoid = 1 / (1 + std::exp(-x));
  return sigmoid * (1 + x * (1 - sigmoid));
}

int main(int, char** arguments) {
  const double shift = atof(arguments[1]);
  const std::vector<int> lengths = {70, 1, 0, 64, 200, 15};
  std::mt19937 rng(0);
  std::normal_distribution<float> normal(0, 2);
  int rows = 0, tiles = 0;
  std::vector<Work> schedule;
  for (int length : lengths) {
    const int count = (length + TILE - 1) / TILE;
    for (int i = 0; i < count; i++) schedule.push_back({rows, length, i * TILE, tiles});
    rows += length;
    tiles += count;
  }
  std::shuffle(schedule.begin(), schedule.end(), rng);
  schedule.resize(schedule.size() + 3, Work{0, 0, 0, 0});

  Reference parts[3];
  const int widths[3] = {DQK, DQK, DV};
  for (int p = 0; p < 3; p++) {
    Reference& part = parts[p];
    part.width = HEADS * widths[p];
    part.stride = part.width + 8;
    part.before.resize(rows * part.stride);
    part.grad.resize(rows * part.stride);
    part.shares.resize(PROGRAMS * part.stride);
    for (u16& x : part.before) x = (u16)round_bf16(normal(rng));
    for (u16& x : part.grad) x = (u16)round_bf16(normal(rng));
    for (u16 x : part.grad) part.want.push_back(as_float((u32)x << 16));
  }
  std::vector<float4> memory(tiles * HEADS * TILE * DQK / 4);
  float* sums = (float*)memory.data();
  for (const Work& work : schedule)
    for (int row = work.row; row < std::min(work.length, work.row + TILE); row++)
      for (int head = 0; head < HEADS; head++)
        for (int column = 0; column < DQK; column++) {
          const int tile = work.tile + work.row / TILE, r = row % TILE;
          const int lane = r % 8 * 4 + column % 8 / 2, value = r % 16 / 8 * 2 + column % 2;
          const float x = normal(rng);
          sums[(tile * HEADS + head) * TILE * DQK + r / 16 * 16 * DQK + column / 8 * 128 + lane * 4 + value] = x;
          parts[0].want[(work.start + row) * parts[0].stride + head * DQK + column] = x * SCALE;
        }

  silu::Parts given;
  silu::Part* targets[3] = {&given.q, &given.k, &given.v};
  for (int p = 0; p < 3; p++) {
    Reference& part = parts[p];
    for (size_t i = 0; i < part.want.size(); i++) part.want[i] *= slope(as_float((u32)part.before[i] << 16) + shift);
    *targets[p] = {part.grad.data(), part.before.data(), part.shares.data(), part.stride, part.stride, part.stride};
  }
  gridDim.x = 3 * HEADS * PROGRAMS;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
    block::run(256, [&] {
      hstu_finish_silu(sums, given, schedule.data(), (int)schedule.size(), HEADS, SCALE);
    });

  double errors[2] = {0, 0};
  for (const Reference& part : parts)
    for (int column = 0; column < part.width; column++) {
      double want = 0, got = 0;
      for (int row = 0; row < rows; row++) {
        const double x = part.want[row * part.stride + column];
        const double y = as_float((u32)part.grad[row * part.stride + column] << 16);
        errors[0] = std::max(errors[0], std::abs(x - y) / (std::abs(x) + 1e-3));
        want += x;
      }
      for (int program = 0; program < PROGRAMS; program++) got += part.shares[program * part.stride + column];
      errors[1] = std::max(errors[1], std::abs(want - got));
    }
  printf("[%g, %g]\n", errors[0], errors[1]);
}
