#include "rank_call.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "patience.h"
#include "threads.h"

namespace mok::cpu {
namespace {

constexpr int kTaskKinds = int(TaskKind::combine) + 1;

// Spin, then yield, then sleep: cheap when the answer is near, and 72 ranks on two cores still get work done.
class Backoff {
 public:
  void pause() {
    if (++n_ <= 64) return;
    if (n_ <= 128) { std::this_thread::yield(); return; }
    std::this_thread::sleep_for(std::chrono::microseconds(n_ < 512 ? 50 : 500));
  }
  bool slow() const { return n_ > 128; }
  bool very_slow() const { return n_ > 512 && n_ % 16 == 0; }  // every few milliseconds

 private:
  int n_ = 0;
};

}  // namespace

// Helpers come and go; the calling thread is always one of the workers, so the stream ends even if none ever starts.
struct RankCall::Workers {
  std::atomic<size_t> ticket{0};
  std::mutex mutex;
  std::condition_variable idle;
  int active = 0;
  bool closed = false;

  bool join() {
    std::lock_guard<std::mutex> lock(mutex);
    if (closed) return false;
    ++active;
    return true;
  }
  void quit() {
    std::lock_guard<std::mutex> lock(mutex);
    --active;
    idle.notify_all();
  }
  void close() {
    std::unique_lock<std::mutex> lock(mutex);
    closed = true;
    idle.wait(lock, [&] { return active == 0; });
  }
};

RankCall::RankCall(Group& group, uint64_t generation, const CallArgs& args)
    : group_(group), generation_(generation), args_(args), shape_(args.shape), rank_(args.rank),
      first_expert_(int64_t{args.rank} * args.shape.local_experts()), layout_(arena_layout(args.shape, kTiles)),
      ops_(tile_ops(args.shape.elem_bytes)), row_bytes_(args.shape.hidden * args.shape.elem_bytes) {}

Status RankCall::run(int workers) {
  bool ok = begin();
  if (ok) {
    sort_and_judge();
    publish();
    raise_flag(FlagLayout::published, generation_);
    ok = exchange();
  }
  if (ok) {
    plan(&tasks_);
    auto shared = std::make_shared<Workers>();
    for (int i = 1; i < workers; ++i) {
      const bool started = run_on_thread([this, shared] {
        if (!shared->join()) return;
        work(*shared);
        shared->quit();
      });
      if (!started) break;
    }
    work(*shared);
    shared->close();
    if (exception_ != nullptr) std::rethrow_exception(exception_);
    ok = !failed_.load(std::memory_order_acquire);
  }
  // I read nothing of this call any more, however it went.
  raise_flag(FlagLayout::finished, generation_);
  if (ok) finish();
  return failed_.load(std::memory_order_acquire) ? status_ : Status{};
}

void RankCall::work(Workers& workers) {
  while (!failed_.load(std::memory_order_acquire)) {
    const size_t i = workers.ticket.fetch_add(1);
    if (i >= tasks_.size()) return;
    try {
      execute(tasks_[i]);
    } catch (...) {  // on a helper's thread it would end the process; run() rethrows it
      if (exception_written_.exchange(true)) return;
      exception_ = std::current_exception();
      failed_.store(true, std::memory_order_release);
      return;
    }
    __atomic_fetch_add(group_.flag(rank_, FlagLayout::progress, rank_), 1, __ATOMIC_RELAXED);
  }
}

// ---- failure ----

void RankCall::fail(const Status& status) {
  if (status_written_.exchange(1) != 0) return;
  status_ = status;
  failed_.store(true, std::memory_order_release);
}

bool RankCall::peer_aborted() {
  for (int32_t peer = 0; peer < shape_.ranks; ++peer) {
    const uint64_t word = load_acquire(group_.flag(rank_, FlagLayout::aborted, peer));
    if (abort_generation(word) >= generation_) {
      fail(abort_status(word));
      return true;
    }
  }
  return false;
}

void RankCall::abort_group(Wait what, int32_t culprit) {
  const uint64_t word = pack_abort(generation_, what, culprit);
  group_.abandon(rank_, generation_, word);
  fail(abort_status(word));
}

void RankCall::raise_flag(int32_t kind, uint64_t value) {
  for (int32_t peer = 0; peer < shape_.ranks; ++peer) store_release(group_.flag(peer, kind, rank_), value);
}

// ---- waiting ----

template <class Ready>
bool RankCall::wait(Wait what, int32_t peer, Ready ready) {
  Backoff backoff;
  Patience patience(limit_s(what));
  for (;;) {
    if (ready()) return true;
    backoff.pause();
    if (!backoff.slow()) continue;
    if (failed_.load(std::memory_order_acquire) || peer_aborted()) return false;
    if (backoff.very_slow()) group_.look_for_lost();
    // A group in which somebody works is slow, not dead (the peer may itself be waiting for the one that works): the
    // deadline starts again with every task that any rank finishes, and there are only so many.
    if (patience.is_out(group_.progress())) {
      abort_group(what, peer);
      return false;
    }
  }
}

bool RankCall::all_peers(Wait what, int32_t kind, uint64_t value) {
  for (int32_t peer = 0; peer < shape_.ranks; ++peer)
    if (!wait(what, peer, [&] { return load_acquire(group_.flag(rank_, kind, peer)) >= value; })) return false;
  return true;
}

bool RankCall::wait_blocks(TaskKind kind, int32_t first_block, int32_t blocks, int32_t tiles) {
  for (int32_t b = first_block; b < first_block + blocks; ++b) {
    Backoff backoff;
    const auto& done = counters_[size_t(kind) * size_t(blocks_) + size_t(b)];
    while (done.load(std::memory_order_acquire) < tiles) {
      if (failed_.load(std::memory_order_acquire)) return false;
      backoff.pause();
    }
  }
  return true;
}

bool RankCall::wait_row_block(int32_t owner, int64_t block) {
  const uint64_t* flag = group_.row_flags(rank_) + int64_t{owner} * max_blocks(shape_, kTiles) + block;
  if (load_acquire(flag) >= generation_) return true;
  return wait(Wait::rows, owner, [&] { return load_acquire(flag) >= generation_; });
}

bool RankCall::finish_tile(TaskKind kind, int32_t block, int32_t tiles) {
  return counters_[size_t(kind) * size_t(blocks_) + size_t(block)].fetch_add(1, std::memory_order_acq_rel) + 1 == tiles;
}

void RankCall::flag_homes(const Task& task) {
  const int64_t at = int64_t{rank_} * max_blocks(shape_, kTiles) + task.block;
  for_each_run(task, [&](const SourceRun& run) { store_release(group_.row_flags(run.source) + at, generation_); });
}

// ---- the stages of a call ----

bool RankCall::begin() {
  if (peer_aborted()) return false;
  raise_flag(FlagLayout::finished, generation_ - 1);
  return all_peers(Wait::previous_call, FlagLayout::finished, generation_ - 1);
}

void RankCall::sort_and_judge() {
  int32_t* counts = arena<int32_t>(rank_, layout_.counts);
  int32_t* sorted = arena<int32_t>(rank_, layout_.slots);
  std::vector<int32_t> cursor(size_t(shape_.experts));
  Verdict verdict{{}, shape_digest(shape_)};
  const int64_t bad = count_slots(args_.ids, shape_.slots(), shape_.experts, counts);
  if (bad >= 0)
    verdict.status = bad_id(rank_, {bad / shape_.top_k, bad % shape_.top_k, shape_.experts, args_.ids[bad]});
  sort_slots(args_.ids, shape_.slots(), shape_.experts, counts, cursor.data(), sorted);
  std::memcpy(arena<Verdict>(rank_, layout_.verdict), &verdict, sizeof verdict);
}

bool RankCall::exchange() {
  if (!all_peers(Wait::routes, FlagLayout::published, generation_)) return false;
  counts_.resize(size_t(shape_.ranks) * size_t(shape_.experts));
  Status verdict;
  for (int32_t src = 0; src < shape_.ranks; ++src) {
    Verdict v;
    std::memcpy(&v, arena<Verdict>(src, layout_.verdict), sizeof v);
    if (verdict.ok() && v.shape_digest != shape_digest(shape_)) verdict = {Code::shape_mismatch, src, 0, 0};
    if (verdict.ok()) verdict = v.status;
    std::memcpy(&counts_[size_t(src) * size_t(shape_.experts)], arena<int32_t>(src, layout_.counts),
                size_t(shape_.experts) * sizeof(int32_t));
  }
  if (verdict.ok()) {
    build_tables();
    const int32_t over = over_capacity(routes_, shape_);
    if (over >= 0) verdict = {Code::over_capacity, over, routes_.rank_rows[over], shape_.max_rows};
  }
  if (!verdict.ok()) fail(verdict);  // every rank sees the same verdicts and counts, so all fail alike
  return verdict.ok();
}

void RankCall::build_tables() {
  const size_t E = size_t(shape_.experts), P = size_t(shape_.ranks);
  const int32_t local = shape_.local_experts();
  route_storage_.resize(4 * E + 2 * P);
  int64_t* at = route_storage_.data();
  for (int64_t** table : {&routes_.rows, &routes_.start, &routes_.before, &routes_.list}) { *table = at; at += E; }
  routes_.rank_rows = at;
  routes_.rank_end = at + P;
  build_routes(counts_.data(), shape_, kTiles.block_m, rank_, routes_);

  list_start_.resize(P * size_t(local));
  for (size_t src = 0; src < P; ++src) {
    int64_t start = 0;
    for (int64_t e = 0; e < first_expert_; ++e) start += counts_[src * E + size_t(e)];
    for (int32_t l = 0; l < local; ++l) {
      list_start_[src * size_t(local) + size_t(l)] = start;
      start += counts_[src * E + size_t(first_expert_ + l)];
    }
  }
  position_.assign(size_t(shape_.slots()), -1);
  const int32_t* sorted = arena<int32_t>(rank_, layout_.slots);
  int64_t used = 0;
  for (size_t e = 0; e < E; ++e) used += counts_[size_t(rank_) * E + e];
  for (int64_t i = 0; i < used; ++i) position_[size_t(sorted[i])] = int32_t(i);

  routed_blocks_ = int32_t(routes_.rank_end[rank_] / kTiles.block_m);
  for (int32_t l = 0; l < local; ++l) {
    const int64_t rows = routes_.rows[first_expert_ + l];
    segments_.push_back({rows, int32_t(routes_.start[first_expert_ + l] / kTiles.block_m),
                         int32_t(ceil_div(rows, kTiles.block_m)), shape_.inter});
  }
  if (shape_.shared_inter > 0)
    segments_.push_back({shape_.tokens, routed_blocks_, int32_t(ceil_div(shape_.tokens, kTiles.block_m)),
                         shape_.shared_inter});
  longest_first_.resize(segments_.size());
  order_by_length(segments_.data(), int32_t(segments_.size()), longest_first_.data());
  blocks_ = routed_blocks_ + (shape_.shared_inter > 0 ? segments_.back().blocks : 0);
  counters_ = std::vector<std::atomic<int32_t>>(size_t(kTaskKinds) * size_t(blocks_));
}

bool RankCall::finish() { return all_peers(Wait::finish, FlagLayout::finished, generation_); }

// ---- what tasks ask about routes ----

StreamShape RankCall::stream_shape(bool recompute) const {
  return {shape_, kTiles, segments_.data(), longest_first_.data(), recompute};
}

RankCall::Rows RankCall::rows_of(const Task& task) const {
  const Segment& s = segments_[size_t(task.segment)];
  const int64_t in_segment = int64_t{task.block - s.first_block} * kTiles.block_m;
  const int64_t base = is_shared(task) ? 0 : routes_.start[first_expert_ + task.segment];
  return {base + in_segment, min_of(kTiles.block_m, s.rows - in_segment)};
}

RankCall::Place RankCall::place_of(int64_t slot) const {
  const int32_t position = position_[size_t(slot)];
  if (position < 0) return {-1, -1};
  const int32_t e = args_.ids[slot];
  return {e / shape_.local_experts(), routes_.start[e] + routes_.before[e] + (position - routes_.list[e])};
}

void RankCall::pull_rows(const Task& task, int64_t ArenaLayout::*array, uint8_t* dst) const {
  const int64_t start = routes_.start[first_expert_ + task.segment];
  for_each_run(task, [&](const SourceRun& run) {
    const int32_t* slots = arena<int32_t>(run.source, layout_.slots) + run.position;
    const uint8_t* rows = arena<uint8_t>(run.source, layout_.*array);
    for (int64_t i = 0; i < run.rows; ++i)
      std::memcpy(dst + (start + run.row + i) * row_bytes_, rows + int64_t{slots[i] / shape_.top_k} * row_bytes_,
                  size_t(row_bytes_));
  });
}

}  // namespace mok::cpu
