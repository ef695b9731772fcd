// The GPUs of the process as seats of EP groups: their arenas, mapped into each other, and the order of their calls.
//
// An arena is an address range that is reserved once and backed by memory as calls need it: it grows at its end, and no
// address ever changes under a call in flight.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "call_order.h"
#include "cuda_driver.h"

namespace mok::ffi {

class CudaSeats {
 public:
  // One seat for each device ordinal; the same one may have several. Throws CudaError, as reserve() does.
  CudaSeats(const CudaDriver& driver, std::vector<int> devices);
  ~CudaSeats();
  CudaSeats(const CudaSeats&) = delete;
  CudaSeats& operator=(const CudaSeats&) = delete;

  int32_t count() const { return int32_t(seats_.size()); }
  int32_t seat_of(int device) const;  // the first seat of a device, -1 = none
  int multiprocessors(int32_t seat) const { return seats_[size_t(seat)].multiprocessors; }
  uint8_t* memory(int32_t seat) const { return seats_[size_t(seat)].memory; }
  HostStatus* host_status(int32_t seat) const { return host_status_ + seat; }

  // Makes room for calls of this layout on every seat.
  void reserve(const ArenaLayout& layout, int64_t max_blocks);
  int64_t bytes() const;  // of device memory, all seats

  CallOrder& order() { return *order_; }

 private:
  struct Region {
    int64_t offset, bytes;
    std::vector<std::pair<int64_t, uint64_t>> pieces;  // bytes, memory
  };
  struct Seat {
    int device, multiprocessors;
    uint8_t* memory = nullptr;
    Region front{0, 0, {}}, rows{SeatMemory::rows, 0, {}};
  };
  void grow(Seat& seat, Region& region, int64_t bytes);

  const CudaDriver& driver_;
  std::vector<Seat> seats_;
  std::vector<int> users_;
  HostStatus* host_status_ = nullptr;
  std::unique_ptr<CallOrder> order_;  // with a lock of its own: making room waits for the GPU, calls there for their peers
  mutable std::mutex mutex_;
};

}  // namespace mok::ffi
