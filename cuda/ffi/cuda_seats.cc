#include "cuda_seats.h"

#include <algorithm>

namespace mok::ffi {
namespace {

constexpr size_t kCallsKept = 1024;  // ranks leave a call together, so none is ever that far behind

}  // namespace

CudaSeats::CudaSeats(const CudaDriver& driver, std::vector<int> devices) : driver_(driver), users_(devices) {
  std::sort(users_.begin(), users_.end());
  users_.erase(std::unique(users_.begin(), users_.end()), users_.end());
  for (int device : devices) {
    seats_.push_back({device, driver.multiprocessors(device)});
    seats_.back().memory = driver.reserve_addresses(SeatMemory::address_range);
  }
  host_status_ = static_cast<HostStatus*>(driver.allocate_host(int64_t{count()} * int64_t{sizeof(HostStatus)}));
}

CudaSeats::~CudaSeats() {
  for (Seat& seat : seats_) {
    for (Region* region : {&seat.front, &seat.rows}) {
      int64_t at = region->offset;
      for (auto [bytes, memory] : region->pieces) {
        driver_.unmap(seat.memory + at, bytes, memory);
        at += bytes;
      }
    }
    driver_.free_addresses(seat.memory, SeatMemory::address_range);
  }
  driver_.free_host(host_status_);
}

int32_t CudaSeats::seat_of(int device) const {
  for (int32_t s = 0; s < count(); ++s)
    if (seats_[size_t(s)].device == device) return s;
  return -1;
}

void CudaSeats::grow(Seat& seat, Region& region, int64_t bytes) {
  const int64_t more = align_up(bytes - region.bytes, int64_t(driver_.granularity(seat.device)));
  if (bytes <= region.bytes) return;
  const uint64_t memory = driver_.map(seat.device, seat.memory + region.offset + region.bytes, more, users_);
  region.pieces.push_back({more, memory});
  region.bytes += more;
}

void CudaSeats::reserve(const ArenaLayout& layout, int64_t max_blocks) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Seat& seat : seats_) {
    grow(seat, seat.front, SeatMemory::row_flags + kMaxSeats * max_blocks * 8);
    grow(seat, seat.rows, layout.bytes);
  }
}

int64_t CudaSeats::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t sum = 0;
  for (const Seat& seat : seats_) sum += seat.front.bytes + seat.rows.bytes;
  return sum;
}

uint64_t CudaSeats::enter(int32_t seat, int64_t run, const void* site) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = std::find_if(calls_.begin(), calls_.end(), [&](const Call& c) {
    return c.run == run && c.site == site && !c.entered[size_t(seat)];
  });
  if (it == calls_.end()) {
    calls_.push_back({++last_generation_, run, site, std::vector<bool>(seats_.size())});
    if (calls_.size() > kCallsKept) calls_.pop_front();
    it = std::prev(calls_.end());
  }
  it->entered[size_t(seat)] = true;
  return it->generation;
}

}  // namespace mok::ffi
