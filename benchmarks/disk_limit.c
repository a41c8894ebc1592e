// The most that a drive gives: loops that read and write blocks of a file and do nothing else.
//
//   disk_limit threads|uring FILE LENGTH BLOCK DEPTH READS WRITES SECONDS FIRST
//
// DEPTH blocks are under way at the same time, of READS reads to WRITES writes; both sweep the file's first
// LENGTH bytes, the writes half of it ahead. O_DIRECT, buffers on huge pages that were touched before,
// io_uring with registered buffers and file where the kernel takes them. Operation number FIRST is the first,
// so that a turn goes on where the last one stopped. Prints one line of JSON.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define HUGE_PAGE ((size_t)2 << 20)
#define POPULATE_WRITE 23  // MADV_POPULATE_WRITE, which older headers lack
#define MOST_DEPTH 1024

struct job {
  int fd;
  uint64_t block, num_blocks, reads, writes;
  unsigned depth;
  double seconds;
  char* memory;
};

struct operation {
  bool is_read;
  uint64_t offset;
};

struct moved {
  uint64_t read_bytes, written_bytes;
};

static void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  vfprintf(stderr, format, values);
  va_end(values);
  fputc('\n', stderr);
  exit(1);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static double cpu_seconds(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

// Operation number k of an even mix of reads and writes.
static struct operation operation_of(const struct job* job, uint64_t k) {
  const uint64_t both = job->reads + job->writes;
  const uint64_t num_reads = k / both * job->reads + k % both * job->reads / both;
  const uint64_t next = (k + 1) / both * job->reads + (k + 1) % both * job->reads / both;
  const bool is_read = next > num_reads;
  const uint64_t block = is_read ? num_reads : k - num_reads + job->num_blocks / 2;
  return (struct operation){is_read, block % job->num_blocks * job->block};
}

static void count(struct moved* moved, bool is_read, uint64_t nbytes) {
  *(is_read ? &moved->read_bytes : &moved->written_bytes) += nbytes;
}

// --- pread and pwrite on threads

struct worker {
  const struct job* job;
  _Atomic uint64_t* next;
  pthread_barrier_t* ready;
  double* until;
  char* buffer;
  struct moved moved;
  pthread_t thread;
};

static void transfer(const struct job* job, struct operation operation, char* buffer) {
  for (uint64_t done = 0; done < job->block;) {
    const off_t offset = (off_t)(operation.offset + done);
    const ssize_t result = operation.is_read ? pread(job->fd, buffer + done, job->block - done, offset)
                                             : pwrite(job->fd, buffer + done, job->block - done, offset);
    if (result == 0) fail("end of file at %lld", (long long)offset);
    if (result < 0 && errno != EINTR)
      fail("%s at %lld: %m", operation.is_read ? "read" : "write", (long long)offset);
    if (result > 0) done += (uint64_t)result;
  }
}

static void* serve(void* argument) {
  struct worker* worker = argument;
  pthread_barrier_wait(worker->ready);  // everyone is here,
  pthread_barrier_wait(worker->ready);  // and the clock runs
  while (now() < *worker->until) {
    const struct operation operation = operation_of(worker->job, atomic_fetch_add(worker->next, 1));
    transfer(worker->job, operation, worker->buffer);
    count(&worker->moved, operation.is_read, worker->job->block);
  }
  return NULL;
}

static double run_threads(const struct job* job, uint64_t* next, struct moved* moved) {
  struct worker workers[MOST_DEPTH];
  _Atomic uint64_t shared_next = *next;
  pthread_barrier_t ready;
  double until = 0;
  pthread_barrier_init(&ready, NULL, job->depth + 1);
  for (unsigned i = 0; i < job->depth; ++i) {
    workers[i] = (struct worker){job, &shared_next, &ready, &until, job->memory + i * job->block, {0, 0}, 0};
    const int error = pthread_create(&workers[i].thread, NULL, serve, &workers[i]);
    if (error) fail("no thread: %s", strerror(error));
  }
  pthread_barrier_wait(&ready);
  const double start = now();
  until = start + job->seconds;
  pthread_barrier_wait(&ready);
  for (unsigned i = 0; i < job->depth; ++i) pthread_join(workers[i].thread, NULL);
  const double seconds = now() - start;
  for (unsigned i = 0; i < job->depth; ++i) {
    moved->read_bytes += workers[i].moved.read_bytes;
    moved->written_bytes += workers[i].moved.written_bytes;
  }
  *next = shared_next;
  return seconds;
}

// --- io_uring

struct ring {
  int fd;
  bool has_buffers, has_file;
  _Atomic unsigned *sq_tail, *cq_head, *cq_tail;
  unsigned *sq_mask, *cq_mask, *sq_array;
  struct io_uring_sqe* sqes;
  struct io_uring_cqe* cqes;
  unsigned num_prepared;
};

struct flight {
  struct operation operation;
  uint64_t done;
};

static int set_up(unsigned entries, struct io_uring_params* params) {
  // From the newest kernels' way to that of the oldest: completions are run when we ask for them.
  const unsigned ways[] = {
#ifdef IORING_SETUP_DEFER_TASKRUN
      IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
#endif
#ifdef IORING_SETUP_COOP_TASKRUN
      IORING_SETUP_COOP_TASKRUN,
#endif
      0};
  for (unsigned i = 0; i < sizeof ways / sizeof *ways; ++i) {
    *params = (struct io_uring_params){.flags = ways[i]};
    const int fd = (int)syscall(__NR_io_uring_setup, entries, params);
    if (fd >= 0) return fd;
    if (errno != EINVAL) break;
  }
  fail("no io_uring: %m");
  return -1;
}

static char* map_ring(int fd, size_t length, uint64_t what) {
  char* memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, (off_t)what);
  if (memory == MAP_FAILED) fail("the ring cannot be mapped: %m");
  return memory;
}

static struct ring open_ring(const struct job* job) {
  struct io_uring_params params;
  struct ring ring = {.fd = set_up(job->depth, &params)};
  char* sq =
      map_ring(ring.fd, params.sq_off.array + params.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
  char* cq = map_ring(ring.fd, params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe),
                      IORING_OFF_CQ_RING);
  ring.sqes = (struct io_uring_sqe*)map_ring(ring.fd, params.sq_entries * sizeof *ring.sqes, IORING_OFF_SQES);
  ring.sq_tail = (_Atomic unsigned*)(sq + params.sq_off.tail);
  ring.sq_mask = (unsigned*)(sq + params.sq_off.ring_mask);
  ring.sq_array = (unsigned*)(sq + params.sq_off.array);
  ring.cq_head = (_Atomic unsigned*)(cq + params.cq_off.head);
  ring.cq_tail = (_Atomic unsigned*)(cq + params.cq_off.tail);
  ring.cq_mask = (unsigned*)(cq + params.cq_off.ring_mask);
  ring.cqes = (struct io_uring_cqe*)(cq + params.cq_off.cqes);
  struct iovec buffers[MOST_DEPTH];
  for (unsigned i = 0; i < job->depth; ++i)
    buffers[i] = (struct iovec){job->memory + i * job->block, job->block};
  ring.has_buffers =
      syscall(__NR_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, buffers, job->depth) == 0;
  ring.has_file = syscall(__NR_io_uring_register, ring.fd, IORING_REGISTER_FILES, &job->fd, 1) == 0;
  return ring;
}

static void prepare(struct ring* ring, const struct job* job, unsigned slot, const struct flight* flight) {
  const unsigned tail = atomic_load_explicit(ring->sq_tail, memory_order_relaxed);
  const unsigned index = tail & *ring->sq_mask;
  const bool is_read = flight->operation.is_read;
  ring->sqes[index] = (struct io_uring_sqe){
      .opcode = ring->has_buffers ? (is_read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED)
                                  : (is_read ? IORING_OP_READ : IORING_OP_WRITE),
      .flags = ring->has_file ? IOSQE_FIXED_FILE : 0,
      .fd = ring->has_file ? 0 : job->fd,
      .off = flight->operation.offset + flight->done,
      .addr = (uint64_t)(uintptr_t)(job->memory + slot * job->block + flight->done),
      .len = (unsigned)(job->block - flight->done),
      .buf_index = ring->has_buffers ? (uint16_t)slot : 0,
      .user_data = slot,
  };
  ring->sq_array[index] = index;
  atomic_store_explicit(ring->sq_tail, tail + 1, memory_order_release);
  ++ring->num_prepared;
}

// Submits what is prepared and waits for one completion.
static void enter(struct ring* ring) {
  const long accepted =
      syscall(__NR_io_uring_enter, ring->fd, ring->num_prepared, 1, IORING_ENTER_GETEVENTS, NULL, 0);
  if (accepted >= 0) {
    ring->num_prepared -= (unsigned)accepted;
  } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
    fail("io_uring_enter: %m");
  }
}

static double run_uring(const struct job* job, uint64_t* next, struct moved* moved, bool* is_registered) {
  struct ring ring = open_ring(job);
  struct flight flights[MOST_DEPTH];
  *is_registered = ring.has_buffers;
  const double start = now(), until = start + job->seconds;
  unsigned in_flight = job->depth;
  for (unsigned slot = 0; slot < job->depth; ++slot) {
    flights[slot] = (struct flight){operation_of(job, (*next)++), 0};
    prepare(&ring, job, slot, &flights[slot]);
  }
  while (in_flight) {
    enter(&ring);
    unsigned head = atomic_load_explicit(ring.cq_head, memory_order_relaxed);
    while (head != atomic_load_explicit(ring.cq_tail, memory_order_acquire)) {
      const struct io_uring_cqe completion = ring.cqes[head & *ring.cq_mask];
      atomic_store_explicit(ring.cq_head, ++head, memory_order_release);
      const unsigned slot = (unsigned)completion.user_data;
      struct flight* flight = &flights[slot];
      if (completion.res == 0) fail("end of file at %llu", (unsigned long long)flight->operation.offset);
      if (completion.res < 0 && completion.res != -EINTR && completion.res != -EAGAIN) {
        fail("%s at %llu: %s", flight->operation.is_read ? "read" : "write",
             (unsigned long long)flight->operation.offset, strerror(-completion.res));
      }
      if (completion.res > 0) flight->done += (uint64_t)completion.res;
      if (flight->done == job->block) {
        count(moved, flight->operation.is_read, job->block);
        if (now() >= until) {
          --in_flight;
          continue;
        }
        *flight = (struct flight){operation_of(job, (*next)++), 0};
      }
      prepare(&ring, job, slot, flight);
    }
  }
  const double seconds = now() - start;
  // Else the kernel has the file open for some time after this has ended, which others may care about.
  if (ring.has_file) syscall(__NR_io_uring_register, ring.fd, IORING_UNREGISTER_FILES, NULL, 0);
  close(ring.fd);
  return seconds;
}

// ---

static char* huge_pages(size_t nbytes) {
  char* memory = mmap(NULL, nbytes + HUGE_PAGE, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("no memory for %zu bytes of buffers: %m", nbytes);
  memory += -(uintptr_t)memory % HUGE_PAGE;
  madvise(memory, nbytes, MADV_HUGEPAGE);
  madvise(memory, nbytes, POPULATE_WRITE);
  // Noise: some drives make short work of zeros. It also touches every page where the kernel would not.
  static uint64_t noise[(1 << 20) / sizeof(uint64_t)];
  uint64_t state = 88172645463325252u;
  for (size_t i = 0; i < sizeof noise / sizeof *noise; ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    noise[i] = state;
  }
  for (size_t i = 0; i < nbytes; i += sizeof noise) {
    memcpy(memory + i, noise, nbytes - i < sizeof noise ? nbytes - i : sizeof noise);
  }
  return memory;
}

static unsigned long long huge_page_bytes(void) {
  char line[256];
  unsigned long long kib = 0;
  FILE* file = fopen("/proc/self/smaps_rollup", "r");
  if (!file) return 0;
  while (fgets(line, sizeof line, file) && sscanf(line, "AnonHugePages: %llu", &kib) != 1) continue;
  fclose(file);
  return kib * 1024;
}

static uint64_t number(const char* text) {
  char* end;
  errno = 0;
  const uint64_t value = strtoull(text, &end, 10);
  if (errno || *end || end == text) fail("expected a number, got %s", text);
  return value;
}

int main(int argc, char** argv) {
  if (argc != 10) fail("usage: %s threads|uring FILE LENGTH BLOCK DEPTH READS WRITES SECONDS FIRST", argv[0]);
  const bool by_uring = strcmp(argv[1], "uring") == 0;
  struct job job = {.block = number(argv[4]),
                    .depth = (unsigned)number(argv[5]),
                    .reads = number(argv[6]),
                    .writes = number(argv[7]),
                    .seconds = atof(argv[8])};
  if (!job.block || job.block % 4096 || !job.depth || job.depth > MOST_DEPTH || !(job.reads + job.writes)) {
    fail("expected a block of a multiple of 4096, a depth of 1 to %d, and operations", MOST_DEPTH);
  }
  job.num_blocks = number(argv[3]) / job.block;
  if (!job.num_blocks) fail("the file is shorter than a block");
  job.fd = open(argv[2], (job.writes ? O_RDWR : O_RDONLY) | O_DIRECT | O_CLOEXEC);
  if (job.fd < 0) fail("%s cannot be opened with O_DIRECT: %m", argv[2]);
  job.memory = huge_pages(job.block * job.depth);
  uint64_t next = number(argv[9]);
  struct moved moved = {0, 0};
  bool is_registered = false;
  const double cpu = cpu_seconds();
  const double seconds =
      by_uring ? run_uring(&job, &next, &moved, &is_registered) : run_threads(&job, &next, &moved);
  printf(
      "{\"read_bytes\": %llu, \"written_bytes\": %llu, \"seconds\": %.9f, \"cpu_seconds\": %.6f, \"next\": "
      "%llu, "
      "\"huge_page_share\": %.3f, \"registered\": %s}\n",
      (unsigned long long)moved.read_bytes, (unsigned long long)moved.written_bytes, seconds,
      cpu_seconds() - cpu, (unsigned long long)next,
      (double)huge_page_bytes() / (double)(job.block * job.depth), is_registered ? "true" : "false");
  return 0;
}
