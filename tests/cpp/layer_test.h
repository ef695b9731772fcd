// Values and bits of the layer. Part of cpu_test.cc.
#pragma once

#include "problem.h"

namespace mok::cpu {
namespace {

// ---- values ----

double relative_l2(const std::vector<double>& got, const std::vector<double>& want, size_t first, size_t n) {
  double error = 0.0, norm = 0.0;
  for (size_t i = first; i < first + n; ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return norm == 0.0 ? std::sqrt(error) : std::sqrt(error / norm);  // what should be zero must be exactly zero
}

// The worst of the `parts` equal parts of a tensor: an expert must not hide behind the others.
void check_close(const Tensor& got, const std::vector<double>& want, int64_t parts, double tolerance, const std::string& where) {
  const std::vector<double> v = got.values();
  const size_t n = want.size() / size_t(parts);
  for (int64_t part = 0; part < parts; ++part) {
    const double error = relative_l2(v, want, size_t(part) * n, n);
    CHECK(error <= tolerance, where + " part " + num(part) + " is off by " + std::to_string(error * 1e6) + "e-6");
  }
}

void check_routed_values(const Problem& p, const Results& r, const Oracle& o) {
  const double whole = p.elem == 4 ? 2e-6 : 4e-3, expert = p.elem == 4 ? 2e-6 : 6e-3;
  check_close(r.y, o.y, 1, whole, p.name() + " y");
  check_close(r.dx, o.dx, 1, expert, p.name() + " dx");
  check_close(r.d_weights, o.d_weights, 1, expert, p.name() + " dw");
  check_close(r.d_gate, o.d_gate, p.c.experts, expert, p.name() + " d_gate");
  check_close(r.d_up, o.d_up, p.c.experts, expert, p.name() + " d_up");
  check_close(r.d_down, o.d_down, p.c.experts, expert, p.name() + " d_down");
}

// Shared weight gradients are per rank; their sum over ranks is the caller's.
void check_shared_values(const Problem& p, const Results& r, const Oracle& o) {
  if (p.c.shared_inter == 0) return;
  for (auto [part, want] : {std::pair{&Results::Rank::d_shared_gate, &o.d_shared_gate},
                            std::pair{&Results::Rank::d_shared_up, &o.d_shared_up},
                            std::pair{&Results::Rank::d_shared_down, &o.d_shared_down}}) {
    std::vector<double> sum(want->size(), 0.0);
    for (const auto& rank : r.ranks)
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += (rank.*part).get(int64_t(i));
    CHECK(relative_l2(sum, *want, 0, sum.size()) <= (p.elem == 4 ? 2e-6 : 6e-3), p.name() + " shared weight gradients");
  }
}

void check_stats(const Problem& p, const Results& r) {
  std::vector<int32_t> experts(size_t(p.c.experts), 0), ranks(r.ranks.size(), 0);
  for (int32_t e : p.ids)
    if (e >= 0) { ++experts[size_t(e)]; ++ranks[size_t(e) / (experts.size() / ranks.size())]; }
  for (const auto& rank : r.ranks)
    CHECK(rank.tokens_per_expert == experts && rank.rows_per_rank == ranks && rank.status[0] == 0, p.name() + " stats");
}

// The determinism contract on one problem: one result for every P, residual policy and number of workers.
void check_problem(const Problem& p, const std::vector<int32_t>& group_sizes) {
  const Oracle truth = oracle(p);
  const auto alone = std::make_shared<Group>(1);
  const Results reference = run_layer(*alone, p, {});
  check_routed_values(p, reference, truth);
  for (int32_t ranks : group_sizes) {
    Group group(ranks);
    const std::string where = p.name() + " on " + num(ranks) + " ranks";
    const Results saved = run_layer(group, p, {});
    check_stats(p, saved);
    check_shared_values(p, saved, truth);
    CHECK(saved.routed_equal(reference), where + ": same bits as on one");
    for (Mode mode : {Mode{false, 1}, Mode{true, 3}, Mode{false, 4}}) {
      const Results other = run_layer(group, p, mode);
      CHECK(other.routed_equal(saved) && other.shared_equal(saved),
            where + (mode.save ? ", saved, " : ", recomputed, ") + num(mode.workers) + " workers: same bits");
    }
  }
}

void test_layer() {
  const Case cases[] = {
      {"two tiles each way", 24, 2, 48, 261, 131, 0, Ids::spread},
      {"odd sizes, shared expert, ids -1", 24, 3, 48, 67, 45, 131, Ids::with_none},
      {"empty experts", 24, 2, 72, 33, 17, 5, Ids::few_experts},
      {"all to one expert", 24, 2, 120, 40, 24, 0, Ids::one_expert},
      {"no experts at all", 24, 2, 24, 16, 8, 0, Ids::none},
      {"no experts but a shared one", 24, 1, 24, 16, 8, 24, Ids::none},
  };
  uint64_t seed = 100;
  for (int32_t elem : {4, 2}) {
    for (const Case& c : cases) check_problem(make_problem(c, elem, ++seed), {1, 2, 3, 4, 8});
    check_problem(make_problem({"one token a rank", 8, 2, 8, 37, 19, 11, Ids::with_none}, elem, ++seed), {1, 2, 4, 8});
    check_problem(make_problem({"no tokens", 4, 2, 0, 9, 5, 3, Ids::spread}, elem, ++seed), {1, 2});
    check_problem(make_problem({"a rack", 72, 4, 144, 24, 16, 8, Ids::spread}, elem, ++seed), {72});
  }
  // in f32 only: the bound for bf16 is one for the mean of many roundings
  check_problem(make_problem({"one of everything", 1, 1, 1, 1, 1, 0, Ids::spread}, 4, ++seed), {1});
}

// Weight gradients in f32 under bf16 operands: those of bf16 before they are rounded, and the contract holds for them.
void test_f32_weight_grads() {
  const Problem p = make_problem({"master weights", 24, 3, 48, 261, 45, 131, Ids::few_experts}, 2, 200);
  auto run = [&](int32_t ranks, Mode mode) {
    Group group(ranks);
    return run_layer(group, p, mode);
  };
  const Results rounded = run(1, {}), wide = run(1, {true, 1, kPatient, true});
  check_routed_values(p, wide, oracle(p));
  CHECK(wide.d_gate.rounded() == rounded.d_gate && wide.d_up.rounded() == rounded.d_up &&
            wide.d_down.rounded() == rounded.d_down && wide.dx == rounded.dx && wide.d_weights == rounded.d_weights,
        "rounded f32 gradients are those in bf16");
  const Results::Rank &got = wide.ranks[0], &want = rounded.ranks[0];
  CHECK(got.d_shared_gate.rounded() == want.d_shared_gate && got.d_shared_up.rounded() == want.d_shared_up &&
            got.d_shared_down.rounded() == want.d_shared_down,
        "those of the shared expert too");
  for (int32_t ranks : {2, 3, 8})
    for (bool save : {true, false})
      CHECK(run(ranks, {save, 2, kPatient, true}).routed_equal(wide), "f32 gradients on " + num(ranks) + " ranks");
}

// A token's rows do not depend on the other tokens of the batch: the definition of batch invariance.
void test_batch_invariance() {
  const Problem p = make_problem({"whole batch", 6, 2, 120, 67, 35, 9, Ids::few_experts}, 2, 7);
  Problem part = p;
  part.c.tokens = 13;
  Group group(1), small(1);
  const Results all = run_layer(group, p, {}), few = run_layer(small, part, {});
  CHECK(std::memcmp(all.y.at(0), few.y.at(0), size_t(13 * 67 * 2)) == 0, "y of the first tokens");
  CHECK(std::memcmp(all.dx.at(0), few.dx.at(0), size_t(13 * 67 * 2)) == 0, "dx of the first tokens");
}

}  // namespace
}  // namespace mok::cpu
