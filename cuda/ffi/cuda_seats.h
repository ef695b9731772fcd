// GPUs as seats of EP groups: their arenas, mapped into each other, and the order of their calls.
//
// An arena is an address range that is reserved once and backed by memory as calls need it: it grows at its end, and no
// address ever changes under a call in flight. The GPUs may be of several processes: then each process makes the memory
// of its own and maps that of the others, all in the same steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "call_order.h"
#include "cuda_driver.h"

namespace mok::ffi {

constexpr int kElsewhere = -1;  // in the place of a device ordinal: a GPU of another process

// Gives the other processes this one's handles of a piece, and returns theirs in the order of seats, with empty ones in
// the places of its own. All are the caller's to close. Blocks; throws if a process does not come, or comes with another
// size. A size of -1: there is nothing to give, let the others know.
using Share = std::function<std::vector<MemoryHandle>(const std::string& piece, int64_t bytes,
                                                      const std::vector<MemoryHandle>& mine, double patience_s)>;

class CudaSeats {
 public:
  // One seat for each device ordinal; the same one may have several. Throws CudaError, as reserve() does.
  CudaSeats(const CudaDriver& driver, std::vector<int> devices);
  // Seats of several processes.
  CudaSeats(const CudaDriver& driver, std::vector<int> devices, Sharing sharing, Share share, CallOrder::Agree agree);
  ~CudaSeats();
  CudaSeats(const CudaSeats&) = delete;
  CudaSeats& operator=(const CudaSeats&) = delete;

  int32_t count() const { return int32_t(seats_.size()); }
  int32_t seat_of(int device) const;  // the first seat of a device, -1 = none
  int multiprocessors(int32_t seat) const { return seats_[size_t(seat)].multiprocessors; }
  uint8_t* memory(int32_t seat) const { return seats_[size_t(seat)].memory.get(); }
  HostStatus* host_status(int32_t seat) const { return calls_->statuses.get() + seat; }

  // Makes room for calls of this layout on every seat. With other processes it takes part in this: all must call it in
  // the same order, and `patience_s` is for how long they are waited for.
  void reserve(const ArenaLayout& layout, int64_t max_blocks, double patience_s);
  int64_t bytes() const;  // of device memory of this process, all seats

  CallOrder& order() { return calls_->order; }
  // Before the driver goes away at the end of the process. Waits until the others have their answer.
  void stop_watching();
  // The job that the seats belong to is over.
  void forget();

 private:
  struct Region {  // of every seat
    std::string name;
    int64_t offset, bytes;
  };
  struct Piece {
    uint8_t* at;
    int64_t bytes;
    uint64_t memory;
  };
  struct Seat {
    int device, multiprocessors;
    std::shared_ptr<uint8_t> memory;  // addresses
  };
  // What calls leave behind, and the thread that watches it where other processes wait for what it says. The thread may
  // outlive the seats: it can be waiting for Python, whose lock may be held by who frees them.
  struct Calls {
    Calls(const CudaDriver& driver, int device, int32_t seats, CallOrder::Agree agree);
    std::shared_ptr<HostStatus> statuses;
    CallOrder order;
    std::atomic<bool> stop{false}, forgotten{false}, stopped{true};
  };
  static void watch(std::shared_ptr<Calls> calls);
  void grow(Region& region, int64_t bytes, double patience_s);
  [[noreturn]] void give_up(size_t pieces_before, std::exception_ptr failure);
  void add_piece(const Seat& seat, const Region& region, int64_t bytes, uint64_t memory);

  const CudaDriver& driver_;
  const Sharing sharing_;
  const Share share_;
  std::vector<Seat> seats_;
  std::vector<int> users_;
  int64_t granularity_ = 1, local_seats_ = 0;
  Region front_{"front", 0, 0}, rows_{"rows", SeatMemory::rows, 0};
  std::vector<Piece> pieces_;
  std::shared_ptr<Calls> calls_;  // with a lock of its own: making room waits for the GPU, calls there for their peers
  std::exception_ptr broken_;     // why room can no longer be made
  mutable std::mutex mutex_;
};

}  // namespace mok::ffi
