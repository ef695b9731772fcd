#include "cuda_seats.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <stdexcept>

namespace mok::ffi {
namespace {

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
    seats_.push_back({device, here ? driver.multiprocessors(device) : 0, driver.reserve_addresses(SeatMemory::address_range)});
    if (!here) continue;
    ++local_seats_;
    granularity_ = std::max(granularity_, int64_t(driver.granularity(device)));
    if (std::find(users_.begin(), users_.end(), device) == users_.end()) users_.push_back(device);
  }
  host_status_ = static_cast<HostStatus*>(driver.allocate_host(int64_t{count()} * int64_t{sizeof(HostStatus)}));
  order_ = std::make_unique<CallOrder>(host_status_, count(), std::move(agree));
}

CudaSeats::~CudaSeats() {
  for (const Piece& piece : pieces_) driver_.unmap(piece.at, piece.bytes, piece.memory);
  for (const Seat& seat : seats_) driver_.free_addresses(seat.memory, SeatMemory::address_range);
  driver_.free_host(host_status_);
}

int32_t CudaSeats::seat_of(int device) const {
  for (int32_t s = 0; s < count(); ++s)
    if (seats_[size_t(s)].device == device) return s;
  return -1;
}

void CudaSeats::add_piece(const Seat& seat, const Region& region, int64_t bytes, uint64_t memory) {
  uint8_t* const at = seat.memory + region.offset + region.bytes;
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
  try {
    for (const Seat& seat : seats_) {
      if (seat.device == kElsewhere) continue;
      add_piece(seat, region, more, driver_.create(seat.device, more, sharing_));
      driver_.zero_now(seat.device, seat.memory + region.offset + region.bytes, more);
      if (sharing_ != Sharing::none) mine.push_back(driver_.export_memory(pieces_.back().memory, sharing_));
    }
    if (sharing_ != Sharing::none) {
      all = share_(region.name + "/" + std::to_string(region.bytes), more, mine, patience_s);
      for (size_t s = 0; s < seats_.size(); ++s)
        if (seats_[s].device == kElsewhere) add_piece(seats_[s], region, more, driver_.import_memory(all.at(s)));
    }
  } catch (const std::exception& e) {
    failure = std::current_exception();
    if (sharing_ != Sharing::none) broken_ = e.what();  // the others have gone on, or given up
    for (; pieces_.size() > before; pieces_.pop_back())
      driver_.unmap(pieces_.back().at, pieces_.back().bytes, pieces_.back().memory);
  }
  close_all(mine);
  close_all(all);
  if (failure) std::rethrow_exception(failure);
  region.bytes += more;
}

void CudaSeats::reserve(const ArenaLayout& layout, int64_t max_blocks, double patience_s) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!broken_.empty()) throw std::runtime_error(broken_);
  grow(front_, SeatMemory::row_flags + kMaxSeats * max_blocks * 8, patience_s);
  grow(rows_, layout.bytes, patience_s);
}

int64_t CudaSeats::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return local_seats_ * (front_.bytes + rows_.bytes);
}

}  // namespace mok::ffi
