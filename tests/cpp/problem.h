// A problem, its float64 oracle, and how a group of ranks runs it. Part of cpu_test.cc.
#pragma once

#include "check.h"

namespace mok::cpu {
namespace {

// ---- a problem: the inputs of a global batch ----

// Elements in bf16 or f32, of exactly the size that XLA would hand over, so that ASan sees a byte too far.
class Tensor {
 public:
  Tensor() = default;
  Tensor(int64_t n, int32_t elem) : elem_(elem), bytes_(size_t(n * elem), 0xff) {}  // 0xffff...: NaN in both

  int64_t size() const { return elem_ == 0 ? 0 : int64_t(bytes_.size()) / elem_; }
  void* at(int64_t i) { return bytes_.data() + i * elem_; }
  const void* at(int64_t i) const { return bytes_.data() + i * elem_; }
  bool operator==(const Tensor& o) const { return bytes_ == o.bytes_; }
  Tensor rounded() const {  // to bf16
    Tensor t(size(), 2);
    for (int64_t i = 0; i < size(); ++i) t.set(i, get(i));
    return t;
  }

  double get(int64_t i) const {
    float f;
    uint16_t half;
    if (elem_ == 4) { std::memcpy(&f, at(i), 4); return f; }
    std::memcpy(&half, at(i), 2);
    const uint32_t wide = uint32_t{half} << 16;
    std::memcpy(&f, &wide, 4);
    return f;
  }
  void set(int64_t i, double v) {
    const float f = float(v);
    if (elem_ == 4) { std::memcpy(at(i), &f, 4); return; }
    uint32_t b;
    std::memcpy(&b, &f, 4);
    const uint16_t half = uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16);
    std::memcpy(at(i), &half, 2);
  }
  std::vector<double> values() const {
    std::vector<double> v;
    for (int64_t i = 0; i < size(); ++i) v.push_back(get(i));
    return v;
  }

 private:
  int32_t elem_ = 0;
  std::vector<uint8_t> bytes_;
};

enum class Ids { spread, with_none, few_experts, one_expert, none };

struct Case {
  const char* name;
  int32_t experts, top_k;
  int64_t tokens, hidden, inter, shared_inter;  // tokens of the global batch
  Ids ids;
};

struct Problem {
  Case c;
  int32_t elem;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  Tensor x, dy, gate, up, down, shared_gate, shared_up, shared_down;

  std::string name() const { return std::string(c.name) + (elem == 2 ? " bf16" : " f32"); }
  int64_t max_rows() const { return c.tokens * c.top_k; }  // the worst case
  Shape shape(int32_t ranks) const {
    return {ranks, c.experts, c.top_k, elem, c.tokens / ranks, c.hidden, c.inter, c.shared_inter, max_rows()};
  }
};

Tensor random_tensor(Random& rnd, int64_t n, int32_t elem, double scale) {
  Tensor t(n, elem);
  for (int64_t i = 0; i < n; ++i) t.set(i, rnd.normal() * scale);
  return t;
}

int32_t random_id(Random& rnd, const Case& c) {
  switch (c.ids) {
    case Ids::spread: return int32_t(rnd.in(0, c.experts - 1));
    case Ids::with_none: return int32_t(rnd.in(-1, c.experts - 1)) / (rnd.in(0, 3) ? 1 : c.experts);
    case Ids::few_experts: return rnd.in(0, 4) == 0 ? -1 : int32_t(rnd.in(0, 2)) * (c.experts / 3) + 1;
    case Ids::one_expert: return c.experts - 1;
    default: return -1;
  }
}

Problem make_problem(const Case& c, int32_t elem, uint64_t seed) {
  Random rnd(seed);
  Problem p;
  p.c = c;
  p.elem = elem;
  for (int64_t i = 0; i < c.tokens * c.top_k; ++i) {
    p.ids.push_back(random_id(rnd, c));
    // zero and negative weights are legal, and the gradient must not divide by them
    p.weights.push_back(rnd.in(0, 9) == 0 ? 0.0f : float(rnd.normal()));
  }
  const double in = 1.0 / std::sqrt(double(c.hidden)), mid = 1.0 / std::sqrt(double(c.inter));
  p.x = random_tensor(rnd, c.tokens * c.hidden, elem, 1.0);
  p.dy = random_tensor(rnd, c.tokens * c.hidden, elem, 1.0);
  p.gate = random_tensor(rnd, c.experts * c.hidden * c.inter, elem, in);
  p.up = random_tensor(rnd, c.experts * c.hidden * c.inter, elem, in);
  p.down = random_tensor(rnd, c.experts * c.hidden * c.inter, elem, mid);
  p.shared_gate = random_tensor(rnd, c.hidden * c.shared_inter, elem, in);
  p.shared_up = random_tensor(rnd, c.hidden * c.shared_inter, elem, in);
  p.shared_down = random_tensor(rnd, c.hidden * c.shared_inter, elem, mid);
  return p;
}

// ---- the oracle: the layer by its definition, in double ----

struct Oracle {
  std::vector<double> y, dx, d_weights, d_gate, d_up, d_down, d_shared_gate, d_shared_up, d_shared_down;
};

// One SwiGLU expert on one token, forward and backward, added into the oracle's sums with router weight w.
// Returns <dY W_d^T, h>.
double add_expert(int64_t H, int64_t I, double w, const double* x, const double* dy, const double* gate,
                  const double* up, const double* down, double* y, double* dx, double* d_gate, double* d_up,
                  double* d_down) {
  double dot = 0.0;
  std::vector<double> g(size_t(I), 0.0), u(g), dg(g), du(g);
  for (int64_t a = 0; a < H; ++a)
    for (int64_t i = 0; i < I; ++i) { g[size_t(i)] += x[a] * gate[a * I + i]; u[size_t(i)] += x[a] * up[a * I + i]; }
  for (int64_t i = 0; i < I; ++i) {
    const double s = 1.0 / (1.0 + std::exp(-g[size_t(i)])), silu = g[size_t(i)] * s, h = silu * u[size_t(i)];
    double dhu = 0.0;
    for (int64_t a = 0; a < H; ++a) {
      y[a] += w * h * down[i * H + a];
      d_down[i * H + a] += w * h * dy[a];
      dhu += dy[a] * down[i * H + a];
    }
    dot += dhu * h;
    dg[size_t(i)] = w * dhu * u[size_t(i)] * (s + silu * (1.0 - s));
    du[size_t(i)] = w * dhu * silu;
  }
  for (int64_t a = 0; a < H; ++a)
    for (int64_t i = 0; i < I; ++i) {
      dx[a] += dg[size_t(i)] * gate[a * I + i] + du[size_t(i)] * up[a * I + i];
      d_gate[a * I + i] += x[a] * dg[size_t(i)];
      d_up[a * I + i] += x[a] * du[size_t(i)];
    }
  return dot;
}

Oracle oracle(const Problem& p) {
  const Case& c = p.c;
  const int64_t H = c.hidden, HI = H * c.inter;
  const auto x = p.x.values(), dy = p.dy.values(), gate = p.gate.values(), up = p.up.values(), down = p.down.values();
  const auto sg = p.shared_gate.values(), su = p.shared_up.values(), sd = p.shared_down.values();
  auto zeros = [](const std::vector<double>& like) { return std::vector<double>(like.size(), 0.0); };
  Oracle o{zeros(x), zeros(x), std::vector<double>(p.weights.size(), 0.0), zeros(gate), zeros(up), zeros(down),
           zeros(sg), zeros(su), zeros(sd)};
  for (int64_t t = 0; t < c.tokens; ++t) {
    const int64_t row = t * H;
    for (int64_t slot = t * c.top_k; slot < (t + 1) * c.top_k; ++slot) {
      if (p.ids[size_t(slot)] < 0) continue;
      const int64_t e = p.ids[size_t(slot)] * HI;
      o.d_weights[size_t(slot)] = add_expert(
          H, c.inter, p.weights[size_t(slot)], &x[size_t(row)], &dy[size_t(row)], &gate[size_t(e)], &up[size_t(e)],
          &down[size_t(e)], &o.y[size_t(row)], &o.dx[size_t(row)], &o.d_gate[size_t(e)], &o.d_up[size_t(e)], &o.d_down[size_t(e)]);
    }
    if (c.shared_inter > 0)
      add_expert(H, c.shared_inter, 1.0, &x[size_t(row)], &dy[size_t(row)], sg.data(), su.data(), sd.data(), &o.y[size_t(row)],
                 &o.dx[size_t(row)], o.d_shared_gate.data(), o.d_shared_up.data(), o.d_shared_down.data());
  }
  return o;
}

// ---- running a problem on a group ----

// Results of all ranks. Routed ones are global arrays, each rank writes its part. `grad_elem`: of weight gradients.
struct Results {
  int32_t grad_elem;
  Tensor y, dx, d_weights, d_gate, d_up, d_down;
  struct Rank {
    std::vector<int32_t> tokens_per_expert, rows_per_rank, status;
    Tensor rows, gate, up, shared_gate, shared_up;           // residuals
    Tensor d_shared_gate, d_shared_up, d_shared_down;
  };
  std::vector<Rank> ranks;

  Results(const Problem& p, int32_t n) : Results(p, n, p.elem) {}
  Results(const Problem& p, int32_t n, int32_t grad)
      : grad_elem(grad), y(p.x.size(), p.elem), dx(p.x.size(), p.elem), d_weights(int64_t(p.weights.size()), 4),
        d_gate(p.gate.size(), grad), d_up(p.gate.size(), grad), d_down(p.gate.size(), grad) {
    const Shape s = p.shape(n);
    const int64_t rows = padded_rows(s, kTiles);
    for (int32_t r = 0; r < n; ++r)
      ranks.push_back({std::vector<int32_t>(size_t(s.experts), -7), std::vector<int32_t>(size_t(n), -7), {-7},
                       Tensor(rows * s.hidden, p.elem), Tensor(rows * s.inter, p.elem), Tensor(rows * s.inter, p.elem),
                       Tensor(s.tokens * s.shared_inter, p.elem), Tensor(s.tokens * s.shared_inter, p.elem),
                       Tensor(p.shared_gate.size(), grad), Tensor(p.shared_gate.size(), grad),
                       Tensor(p.shared_gate.size(), grad)});
  }

  SavedBuffers saved(int32_t rank, bool save) {
    Rank& r = ranks[size_t(rank)];
    if (!save) return {};
    return {r.rows.at(0), r.gate.at(0), r.up.at(0), r.shared_gate.at(0), r.shared_up.at(0)};
  }
  ForwardResults forward(const Shape& s, int32_t rank, bool save) {
    Rank& r = ranks[size_t(rank)];
    return {y.at(rank * s.tokens * s.hidden), r.tokens_per_expert.data(), r.rows_per_rank.data(), r.status.data(),
            saved(rank, save)};
  }
  BackwardResults backward(const Shape& s, int32_t rank) {
    Rank& r = ranks[size_t(rank)];
    const int64_t w = rank * s.local_experts() * s.hidden * s.inter;
    return {dx.at(rank * s.tokens * s.hidden), static_cast<float*>(d_weights.at(rank * s.slots())),
            {d_gate.at(w), d_up.at(w), d_down.at(w)},
            {r.d_shared_gate.at(0), r.d_shared_up.at(0), r.d_shared_down.at(0)},
            grad_elem};
  }
  bool routed_equal(const Results& o) const {
    return y == o.y && dx == o.dx && d_weights == o.d_weights && d_gate == o.d_gate && d_up == o.d_up && d_down == o.d_down;
  }
  bool shared_equal(const Results& o) const {
    for (size_t r = 0; r < ranks.size(); ++r)
      if (!(ranks[r].d_shared_gate == o.ranks[r].d_shared_gate && ranks[r].d_shared_up == o.ranks[r].d_shared_up &&
            ranks[r].d_shared_down == o.ranks[r].d_shared_down))
        return false;
    return true;
  }
};

// Call sites of a program.
constexpr uint64_t kForwardSite = 1, kBackwardSite = 2, kOtherSite = 3;

CallKey new_call(uint64_t site) {
  static std::atomic<int64_t> run{0};
  return {++run, site};
}

constexpr double kPatient = 100.0;  // seconds: for calls that must succeed on a busy machine

CallArgs call_args(const Problem& p, const Shape& s, int32_t rank, double timeout_s) {
  const int64_t w = rank * s.local_experts() * s.hidden * s.inter;
  return {s, rank, timeout_s, timeout_s, p.x.at(rank * s.tokens * s.hidden), p.ids.data() + rank * s.slots(),
          p.weights.data() + rank * s.slots(), {p.gate.at(w), p.up.at(w), p.down.at(w)},
          {p.shared_gate.at(0), p.shared_up.at(0), p.shared_down.at(0)}};
}

struct Mode {
  bool save = true;
  int workers = 1;
  double timeout_s = kPatient;
  bool f32_weight_grads = false;
};

Status forward(Group& group, CallKey key, const Problem& p, const Shape& s, int32_t rank, Results* out, Mode mode = {}) {
  const Entrance entrance(group, rank, key, arena_layout(s, kTiles), kPatient);
  if (entrance.abandoned()) return entrance.why();
  return run_forward(group, entrance.generation(), call_args(p, s, rank, mode.timeout_s), out->forward(s, rank, mode.save),
                     mode.workers);
}

Status backward(Group& group, CallKey key, const Problem& p, const Shape& s, int32_t rank, Results* out, Mode mode = {}) {
  const Entrance entrance(group, rank, key, arena_layout(s, kTiles), kPatient);
  if (entrance.abandoned()) return entrance.why();
  return run_backward(group, entrance.generation(), call_args(p, s, rank, mode.timeout_s), out->saved(rank, mode.save),
                      p.dy.at(rank * s.tokens * s.hidden), out->backward(s, rank), mode.workers);
}

// Forward and backward on all ranks; arenas and scratch are poisoned before each.
Results run_layer(Group& group, const Problem& p, Mode mode) {
  const Shape s = p.shape(group.ranks());
  Results out(p, group.ranks(), mode.f32_weight_grads ? 4 : p.elem);
  for (auto [call, site] : {std::pair{&forward, kForwardSite}, std::pair{&backward, kBackwardSite}}) {
    group.poison();
    const CallKey key = new_call(site);
    on_ranks(group.ranks(), [&, call = call](int32_t rank) {
      const Status status = call(group, key, p, s, rank, &out, mode);
      CHECK(status.ok(), p.name() + ": " + text(status));
    });
  }
  return out;
}

}  // namespace
}  // namespace mok::cpu
