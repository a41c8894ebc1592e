// io_uring by its system calls. The kernel and this thread share two queues in memory: the kernel moves the
// head of the submissions and the tail of the completions, this thread the other two.

#include <cerrno>
#include <system_error>

#include "io/ring.hpp"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

// Buffers can be registered one by one since Linux 5.19; older headers do not tell how.
#if defined(IORING_RSRC_REGISTER_SPARSE)

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace zerooffload::io {
namespace {

// Not an operation of a request: the read of the event that `wake` writes.
constexpr std::uint64_t kWakeUp = ~std::uint64_t{0};

// Linux 5.7: plain reads and writes, no lost completions, and events that are waited for without a thread.
constexpr std::uint32_t kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_FAST_POLL;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

class Mapping {
 public:
  Mapping(int fd, std::size_t nbytes, std::uint64_t what) : nbytes_(nbytes) {
    data_ = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                   static_cast<off_t>(what));
    if (data_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of a ring");
    ::madvise(data_, nbytes, MADV_DONTFORK);
  }
  ~Mapping() { ::munmap(data_, nbytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  template <typename T>
  T* at(std::uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(data_) + offset);
  }

 private:
  void* data_;
  std::size_t nbytes_;
};

// Where the ring's only thread submits, the kernel leaves the end of an operation to it as well, for when it
// waits: that saves interrupts and locks, but Linux has it since 6.1 only.
int set_up(std::uint32_t num_entries, io_uring_params* params) {
#if defined(IORING_SETUP_DEFER_TASKRUN)
  constexpr std::uint32_t kAttempts[] = {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0};
#else
  constexpr std::uint32_t kAttempts[] = {0};
#endif
  for (const std::uint32_t flags : kAttempts) {
    *params = {};
    params->flags = flags | IORING_SETUP_CLAMP;
    const long fd = ::syscall(__NR_io_uring_setup, num_entries, params);
    if (fd >= 0) return static_cast<int>(fd);
    if (errno != EINVAL) break;
  }
  throw std::system_error(errno, std::generic_category(), "io_uring_setup");
}

class KernelRing final : public Ring {
 public:
  // One entry more, for the event.
  explicit KernelRing(std::uint32_t num_entries)
      : fd_(set_up(num_entries + 1, &params_)),
        event_(::eventfd(0, EFD_CLOEXEC)),
        queues_(require(), queues_nbytes(), IORING_OFF_SQ_RING),
        entries_(fd_.get(), params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {}

  void prepare(const Entry& entry) override {
    io_uring_sqe& sqe = next_sqe();
    const Extent& extent = entry.extent;
    sqe.fd = extent.fd;
    sqe.user_data = entry.id;
    if (entry.issue == Issue::kOnWorker) sqe.flags = IOSQE_ASYNC;
    if (entry.operation == Operation::kFlush) {
      sqe.opcode = IORING_OP_FSYNC;
      sqe.fsync_flags = IORING_FSYNC_DATASYNC;
      return;
    }
    sqe.off = static_cast<std::uint64_t>(extent.offset);
    sqe.addr = reinterpret_cast<std::uintptr_t>(extent.data);
    sqe.len = static_cast<std::uint32_t>(extent.nbytes);
    const bool reads = entry.operation == Operation::kRead;
    if (entry.buffer == kUnregistered) {
      sqe.opcode = reads ? IORING_OP_READ : IORING_OP_WRITE;
    } else {
      sqe.opcode = reads ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
      sqe.buf_index = static_cast<std::uint16_t>(entry.buffer);
    }
  }

  Entered submit_and_wait() override {
    if (!awaits_event_) {
      event_at_ = tail_;
      io_uring_sqe& sqe = next_sqe();
      sqe.opcode = IORING_OP_READ;
      sqe.fd = event_.get();
      sqe.addr = reinterpret_cast<std::uintptr_t>(&event_count_);
      sqe.len = sizeof event_count_;
      sqe.user_data = kWakeUp;
      awaits_event_ = true;
    }
    std::uint32_t* const tail = queues_.at<std::uint32_t>(params_.sq_off.tail);
    __atomic_store_n(tail, tail_, __ATOMIC_RELEASE);
    const std::uint32_t num_prepared = tail_ - submitted_;
    const long accepted =
        ::syscall(__NR_io_uring_enter, fd_.get(), num_prepared, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (accepted < 0) return {0, errno};
    const auto num_accepted = static_cast<std::uint32_t>(accepted);
    // The event's entry is none of the caller's. (Counters wrap; an earlier event is a huge distance away.)
    const bool with_event = event_at_ - submitted_ < num_accepted;
    submitted_ += num_accepted;
    return {num_accepted - (with_event ? 1 : 0), 0};
  }

  bool next(Completion* completion) override {
    std::uint32_t* const head = queues_.at<std::uint32_t>(params_.cq_off.head);
    const std::uint32_t tail =
        __atomic_load_n(queues_.at<std::uint32_t>(params_.cq_off.tail), __ATOMIC_ACQUIRE);
    const std::uint32_t mask = *queues_.at<std::uint32_t>(params_.cq_off.ring_mask);
    while (*head != tail) {
      const io_uring_cqe cqe = queues_.at<io_uring_cqe>(params_.cq_off.cqes)[*head & mask];
      __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
      if (cqe.user_data == kWakeUp) {
        awaits_event_ = false;
        continue;
      }
      *completion = {static_cast<std::uint32_t>(cqe.user_data), cqe.res};
      return true;
    }
    return false;
  }

  void wake() override {
    const std::uint64_t one = 1;
    // It can fail only if it was called 2^64 times.
    static_cast<void>(!::write(event_.get(), &one, sizeof one));
  }

  int register_buffer(int buffer, std::byte* data, std::int64_t nbytes) override {
    if (!has_table_) {
      io_uring_rsrc_register table{};
      table.nr = kMostBuffers;
      table.flags = IORING_RSRC_REGISTER_SPARSE;
      if (registers(IORING_REGISTER_BUFFERS2, &table, sizeof table) < 0) return errno;
      has_table_ = true;
    }
    const iovec range{data, static_cast<std::size_t>(nbytes)};
    io_uring_rsrc_update2 update{};
    update.offset = static_cast<std::uint32_t>(buffer);
    update.data = reinterpret_cast<std::uintptr_t>(&range);
    update.nr = 1;
    return registers(IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof update) < 0 ? errno : 0;
  }

 private:
  int require() const {
    if ((params_.features & kNeeded) != kNeeded) {
      throw std::system_error(ENOSYS, std::generic_category(), "io_uring of Linux before 5.7");
    }
    if (event_.get() < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    return fd_.get();
  }

  std::size_t queues_nbytes() const {
    const std::size_t submissions = params_.sq_off.array + params_.sq_entries * sizeof(std::uint32_t);
    const std::size_t completions = params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe);
    return submissions > completions ? submissions : completions;
  }

  io_uring_sqe& next_sqe() {
    const std::uint32_t index = tail_++ & *queues_.at<std::uint32_t>(params_.sq_off.ring_mask);
    queues_.at<std::uint32_t>(params_.sq_off.array)[index] = index;
    io_uring_sqe& sqe = entries_.at<io_uring_sqe>(0)[index];
    sqe = {};
    return sqe;
  }

  long registers(unsigned what, const void* argument, std::size_t nbytes) const {
    return ::syscall(__NR_io_uring_register, fd_.get(), what, argument, nbytes);
  }

  io_uring_params params_{};
  std::uint64_t event_count_ = 0;
  const Descriptor fd_;
  const Descriptor event_;
  const Mapping queues_;
  const Mapping entries_;
  std::uint32_t tail_ = 0;
  std::uint32_t submitted_ = 0;
  std::uint32_t event_at_ = 0;
  bool awaits_event_ = false;
  bool has_table_ = false;
};

}  // namespace

std::unique_ptr<Ring> open_kernel_ring(std::uint32_t num_entries) {
  return std::make_unique<KernelRing>(num_entries);
}

}  // namespace zerooffload::io

#else

namespace zerooffload::io {

std::unique_ptr<Ring> open_kernel_ring(std::uint32_t) {
  throw std::system_error(ENOSYS, std::generic_category(), "built without Linux's header of io_uring");
}

}  // namespace zerooffload::io

#endif
