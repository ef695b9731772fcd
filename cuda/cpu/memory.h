// Memory outside XLA's: what a rank alone uses, and what the ranks of a group share within a process or across several.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace mok::cpu {

// Grow-only aligned memory of this process, zeroed when it grows.
class Buffer {
 public:
  uint8_t* data() const { return data_.get(); }
  int64_t bytes() const { return bytes_; }
  void reserve(int64_t bytes);
  void release() { data_.reset(); bytes_ = 0; }

 private:
  struct Free { void operator()(uint8_t* p) const { std::free(p); } };
  std::unique_ptr<uint8_t, Free> data_;
  int64_t bytes_ = 0;
};

// A file in memory that several processes of a host map. It has no name anywhere, so nothing is left of it when the
// last of them has ended, however it ended; and it is not bound by the size of /dev/shm.
class SharedFile {
 public:
  SharedFile() = default;  // no file
  static SharedFile create(const std::string& label);
  // The one that another process has open; none if there is no such process any more.
  static SharedFile of_process(int64_t pid, int descriptor);
  ~SharedFile();
  SharedFile(SharedFile&& o) noexcept : descriptor_(o.descriptor_) { o.descriptor_ = -1; }
  SharedFile& operator=(SharedFile&&) = delete;

  explicit operator bool() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  int64_t bytes() const;
  void resize(int64_t bytes) const;  // what is new is zero and takes no memory before it is touched

 private:
  explicit SharedFile(int descriptor) : descriptor_(descriptor) {}
  int descriptor_ = -1;
};

// A mapping of the first bytes of a shared file, or of memory of this process alone if there is no file.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const SharedFile& file, int64_t bytes);
  ~Mapping();
  Mapping(Mapping&& o) noexcept : data_(o.data_), bytes_(o.bytes_) { o.data_ = nullptr; }
  Mapping& operator=(Mapping&& o) noexcept;
  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Equal pieces of memory, one per rank, at the same size in every process: allocations of their own within a process
// (where a sanitizer sees the end of each), parts of one file across several.
class Pieces {
 public:
  Pieces(int32_t ranks, SharedFile file) : file_(std::move(file)), own_(size_t(ranks)), at_(size_t(ranks)) {}
  uint8_t* of(int32_t rank) const { return at_[size_t(rank)]; }
  int64_t bytes() const { return bytes_; }  // of a piece
  const SharedFile& file() const { return file_; }

  // Gives every piece this size, a multiple of 8. What was in them is gone.
  void resize(int64_t bytes);
  void release();

 private:
  const SharedFile file_;
  std::vector<Buffer> own_;
  Mapping mapping_;
  std::vector<uint8_t*> at_;
  int64_t bytes_ = 0;
};

}  // namespace mok::cpu
