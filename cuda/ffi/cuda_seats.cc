#include "cuda_seats.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace mok::ffi {
namespace {

constexpr auto kWatchInterval = std::chrono::milliseconds(5);
constexpr int kMostIntervals = 2400;  // longer than processes wait for each other's answer

void close_all(const std::vector<MemoryHandle>& handles) {
  for (const MemoryHandle& handle : handles)
    if (handle.fd >= 0) close(handle.fd);
}

}  // namespace

CudaSeats::CudaSeats(const CudaDriver& driver, std::vector<int> devices)
    : CudaSeats(driver, std::move(devices), Sharing::none, nullptr, nullptr) {}

CudaSeats::CudaSeats(const CudaDriver& driver, std::vector<int> devices, Sharing sharing, Share share,
                     CallOrder::Agree agree)
    : driver_(driver), sharing_(sharing), share_(std::move(share)) {
  if (devices.size() > size_t(kMaxSeats))
    throw std::runtime_error(std::to_string(devices.size()) + " GPUs that exchange rows are more than " + std::to_string(kMaxSeats));
  for (int device : devices) {
    const bool here = device != kElsewhere;
    const std::shared_ptr<uint8_t> memory(driver.reserve_addresses(SeatMemory::address_range), [&driver](uint8_t* at) {
      driver.free_addresses(at, SeatMemory::address_range);
    });
    seats_.push_back({device, here ? driver.multiprocessors(device) : 0, memory});
    if (!here) continue;
    ++local_seats_;
    granularity_ = std::max(granularity_, int64_t(driver.granularity(device)));
    if (std::find(users_.begin(), users_.end(), device) == users_.end()) users_.push_back(device);
  }
  const bool watched = agree != nullptr;
  calls_ = std::make_shared<Calls>(driver, users_.at(0), count(), std::move(agree));
  if (watched) {
    calls_->stopped = false;
    std::thread(&CudaSeats::watch, calls_).detach();
  }
}

CudaSeats::Calls::Calls(const CudaDriver& driver, int device, int32_t seats, CallOrder::Agree agree)
    : statuses(static_cast<HostStatus*>(driver.allocate_host(device, int64_t{seats} * int64_t{sizeof(HostStatus)})),
               [&driver](HostStatus* memory) { driver.free_host(memory); }),
      order(statuses.get(), seats, std::move(agree)) {}

void CudaSeats::watch(std::shared_ptr<Calls> calls) {
  for (bool last = false; !last; std::this_thread::sleep_for(kWatchInterval)) {
    last = calls->stop;  // the others wait for what this process says of a failure of its last call
    if (!calls->forgotten) calls->order.watch();
  }
  calls->stopped = true;
}

void CudaSeats::stop_watching() {
  calls_->stop = true;
  for (int i = 0; i < kMostIntervals && !calls_->stopped; ++i) std::this_thread::sleep_for(kWatchInterval);
}

void CudaSeats::forget() {
  calls_->forgotten = true;
  calls_->stop = true;
}

CudaSeats::~CudaSeats() {
  forget();
  for (const Piece& piece : pieces_) driver_.unmap(piece.at, piece.bytes, piece.memory);
}

int32_t CudaSeats::seat_of(int device) const {
  for (int32_t s = 0; s < count(); ++s)
    if (seats_[size_t(s)].device == device) return s;
  return -1;
}

void CudaSeats::add_piece(const Seat& seat, const Region& region, int64_t bytes, uint64_t memory) {
  uint8_t* const at = seat.memory.get() + region.offset + region.bytes;
  try {
    driver_.map(at, bytes, memory, users_);
  } catch (...) {
    driver_.release(memory);
    throw;
  }
  pieces_.push_back({at, bytes, memory});
}

void CudaSeats::grow(Region& region, int64_t bytes, double patience_s) {
  const int64_t more = align_up(bytes - region.bytes, granularity_);
  if (bytes <= region.bytes) return;
  const size_t before = pieces_.size();
  std::vector<MemoryHandle> mine, all;
  std::exception_ptr failure;
  auto attempt = [&](auto act) {
    try {
      act();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  };
  attempt([&] {
    for (const Seat& seat : seats_) {
      if (seat.device == kElsewhere) continue;
      add_piece(seat, region, more, driver_.create(seat.device, more, sharing_));
      driver_.zero_now(seat.device, pieces_.back().at, more);
      if (sharing_ != Sharing::none) mine.push_back(driver_.export_memory(pieces_.back().memory, sharing_));
    }
  });
  if (sharing_ != Sharing::none) {
    const std::string piece = region.name + "/" + std::to_string(region.bytes);
    attempt([&] { all = share_(piece, failure ? -1 : more, mine, patience_s); });
    attempt([&] {
      for (size_t s = 0; !failure && s < seats_.size(); ++s)
        if (seats_[s].device == kElsewhere) add_piece(seats_[s], region, more, driver_.import_memory(all.at(s)));
    });
  }
  close_all(mine);
  close_all(all);
  if (failure) give_up(before, failure);
  region.bytes += more;
}

void CudaSeats::give_up(size_t pieces_before, std::exception_ptr failure) {
  for (; pieces_.size() > pieces_before; pieces_.pop_back())
    driver_.unmap(pieces_.back().at, pieces_.back().bytes, pieces_.back().memory);
  if (sharing_ != Sharing::none) broken_ = failure;  // the others have gone on, or given up
  std::rethrow_exception(failure);
}

void CudaSeats::reserve(const ArenaLayout& layout, int64_t max_blocks, double patience_s) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (broken_) std::rethrow_exception(broken_);
  grow(front_, SeatMemory::row_flags + kMaxSeats * max_blocks * 8, patience_s);
  grow(rows_, layout.bytes, patience_s);
}

int64_t CudaSeats::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return local_seats_ * (front_.bytes + rows_.bytes);
}

}  // namespace mok::ffi
