#include "cuda_seats.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace mok::ffi {

CudaSeats::CudaSeats(const CudaDriver& driver, std::vector<int> devices) : driver_(driver), users_(devices) {
  if (devices.size() > size_t(kMaxSeats))
    throw std::runtime_error(std::to_string(devices.size()) + " GPUs in a process are more than " + std::to_string(kMaxSeats));
  std::sort(users_.begin(), users_.end());
  users_.erase(std::unique(users_.begin(), users_.end()), users_.end());
  for (int device : devices) {
    seats_.push_back({device, driver.multiprocessors(device)});
    seats_.back().memory = driver.reserve_addresses(SeatMemory::address_range);
  }
  host_status_ = static_cast<HostStatus*>(driver.allocate_host(int64_t{count()} * int64_t{sizeof(HostStatus)}));
  order_ = std::make_unique<CallOrder>(host_status_, count());
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

}  // namespace mok::ffi
