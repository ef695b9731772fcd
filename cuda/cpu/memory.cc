#include "memory.h"

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../core/types.h"

namespace mok::cpu {
namespace {

constexpr int64_t kPage = 4096;

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("cannot " + what + ": " + std::strerror(errno));
}

}  // namespace

void Buffer::reserve(int64_t bytes) {
  if (bytes <= bytes_) return;
  const size_t size = size_t(align_up(bytes, kPage));
  data_.reset();
  // calloc of a large size is lazily zeroed memory: the room for the worst case costs nothing until it is used
  void* p = std::calloc(size, 1);
  if (p == nullptr) { bytes_ = 0; throw std::bad_alloc(); }
  data_.reset(static_cast<uint8_t*>(p));
  bytes_ = int64_t(size);
}

SharedFile SharedFile::create(const std::string& label) {
  const int descriptor = memfd_create(label.c_str(), MFD_CLOEXEC);
  if (descriptor < 0) fail("create shared memory (memfd_create)");
  return SharedFile(descriptor);
}

SharedFile SharedFile::of_process(int64_t pid, int descriptor) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  const int own = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own < 0 && errno != ENOENT)
    fail("open the shared memory of process " + std::to_string(pid) + " at " + path +
         " (the processes of an EP group must run as one user, in one PID namespace)");
  return SharedFile(own);
}

SharedFile::~SharedFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

int64_t SharedFile::bytes() const {
  struct stat info;
  if (fstat(descriptor_, &info) != 0) fail("read the size of shared memory");
  return info.st_size;
}

void SharedFile::resize(int64_t bytes) const {
  if (ftruncate(descriptor_, bytes) != 0) fail("resize shared memory to " + std::to_string(bytes) + " bytes");
}

Mapping::Mapping(const SharedFile& file, int64_t bytes) : bytes_(bytes) {
  const int flags = file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* p = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, file.descriptor(), 0);
  if (p == MAP_FAILED) {
    if (errno == ENOMEM) throw std::bad_alloc();
    fail("map " + std::to_string(bytes) + " bytes of shared memory");
  }
  data_ = static_cast<uint8_t*>(p);
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, size_t(bytes_));
}

Mapping& Mapping::operator=(Mapping&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(bytes_, o.bytes_);
  return *this;
}

void Pieces::resize(int64_t bytes) {
  bytes_ = 0;  // until every rank has its piece
  if (file_) {
    const int64_t all = bytes * int64_t(at_.size());
    if (file_.bytes() < all) file_.resize(all);
    if (mapping_.bytes() < all) {
      mapping_ = Mapping();
      mapping_ = Mapping(file_, all);
    }
  }
  for (size_t r = 0; r < at_.size(); ++r) {
    if (!file_) own_[r].reserve(bytes);
    at_[r] = file_ ? mapping_.data() + int64_t(r) * bytes : own_[r].data();
  }
  bytes_ = bytes;
}

void Pieces::release() {
  if (file_) file_.resize(0);
  mapping_ = Mapping();
  for (Buffer& b : own_) b.release();
  bytes_ = 0;
}

}  // namespace mok::cpu
