// The Python face of the native module: the only file that knows Python.
//
// Addresses come as integers (`tensor.data_ptr()`); the caller keeps what they point to alive. Every call
// that works or waits releases the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "base/dtype.hpp"
#include "base/thread_pool.hpp"
#include "cpu/target.hpp"
#include "io/engine.hpp"
#include "io/failure.hpp"
#include "io/thread_engine.hpp"
#include "io/uring_engine.hpp"
#include "optim/exact_sum.hpp"
#include "optim/gradients.hpp"
#include "optim/master_weights.hpp"
#include "optim/step.hpp"
#include "optim/traffic.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace zerooffload;

namespace {

using Address = std::uintptr_t;
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// --- CPU target
// ------------------------------------------------------------------------------------------------------

std::vector<std::string> target_names() {
  std::vector<std::string> names;
  for (const cpu::Target target : cpu::supported_targets()) names.emplace_back(cpu::target_name(target));
  return names;
}

void bind_cpu(nb::module_& m) {
  m.def("supported_targets", &target_names, "CPU targets of this build that this CPU can run, best last.");
  m.def(
      "active_target", [] { return cpu::target_name(cpu::active_target()); },
      "The CPU target in use: the best one, or that named by ZEROOFFLOAD_CPU_TARGET.");
  m.def("set_target", &cpu::set_target, "name"_a, "Changes the CPU target of the whole process.");
}

// --- kernels
// ---------------------------------------------------------------------------------------------------------

// A moment as Python hands it over: addresses of its values and, for 8-bit ones, of its exponents.
using MomentAddresses = std::vector<std::pair<Address, Address>>;

void step(ThreadPool& pool, optim::Rule rule, Address param, Dtype param_dtype, Address companion,
          Address grad, Dtype grad_dtype, optim::MomentFormat moment_format, const MomentAddresses& moments,
          std::int64_t numel, const std::vector<double>& scalars, std::int64_t first_index,
          std::uint32_t seed, std::ptrdiff_t param_origin, std::ptrdiff_t record_origin) {
  const optim::RuleEntry& entry = optim::rule_entry(rule);
  if (moments.size() != static_cast<std::size_t>(entry.num_moments)) {
    throw std::invalid_argument("moments: expected " + std::to_string(entry.num_moments) + ", got " +
                                std::to_string(moments.size()));
  }
  if (scalars.size() != static_cast<std::size_t>(entry.num_scalars)) {
    throw std::invalid_argument("scalars: expected " + std::to_string(entry.num_scalars) + ", got " +
                                std::to_string(scalars.size()));
  }
  optim::StepArrays arrays{
      at<void>(param), param_dtype, at<void>(companion), at<const void>(grad), grad_dtype,
      moment_format,   {},          param_origin,        record_origin};
  for (std::size_t i = 0; i < moments.size(); ++i) {
    arrays.moments.values[i] = at<void>(moments[i].first);
    arrays.moments.exponents[i] = at<std::uint8_t>(moments[i].second);
  }
  std::vector<float> rounded;
  for (const double scalar : scalars) rounded.push_back(static_cast<float>(scalar));
  const nb::gil_scoped_release released;
  optim::step(pool, rule, arrays, numel, rounded.data(), first_index, seed);
}

void split_fp32(ThreadPool& pool, Address source, Address param, Address remainder, std::int64_t numel) {
  optim::split_fp32(pool, at<const float>(source), at<std::uint16_t>(param), at<std::int16_t>(remainder),
                    numel);
}

void join_fp32(ThreadPool& pool, Address param, Address remainder, Address target, std::int64_t numel) {
  optim::join_fp32(pool, at<const std::uint16_t>(param), at<const std::int16_t>(remainder), at<float>(target),
                   numel);
}

void square_sums(ThreadPool& pool, Address grad, Dtype grad_dtype, std::int64_t numel, Address sums) {
  optim::square_sums(pool, at<const void>(grad), grad_dtype, numel, at<double>(sums));
}

void arrive(ThreadPool& pool, optim::Arrival arrival, Address target, Dtype target_dtype, Address source,
            Dtype source_dtype, std::int64_t numel, Address sums) {
  optim::arrive(pool, arrival, at<void>(target), target_dtype, at<const void>(source), source_dtype, numel,
                at<double>(sums));
}

double exact_sum(Address values, std::int64_t numel) {
  return optim::exact_sum(at<const double>(values), numel);
}

void move_traffic(ThreadPool& pool, const std::vector<std::tuple<Address, std::int64_t, bool>>& streams,
                  std::int64_t numel) {
  std::vector<optim::Stream> arrays;
  for (const auto& [address, item_bytes, written] : streams) {
    arrays.push_back(optim::Stream{at<void>(address), item_bytes, written});
  }
  const nb::gil_scoped_release released;
  optim::move_traffic(pool, arrays, numel);
}

void bind_kernels(nb::module_& m) {
  m.attr("BLOCK_NUMEL") = optim::kBlockNumel;
  m.attr("SCALE_BLOCK_NUMEL") = optim::kScaleBlockNumel;
  nb::enum_<Dtype>(m, "Dtype", "Item types that the kernels know.")
      .value("float32", Dtype::kFloat32)
      .value("bfloat16", Dtype::kBfloat16)
      .value("float16", Dtype::kFloat16);
  nb::enum_<optim::Rule>(m, "Rule", "What an optimizer does to one element.")
      .value("adamw", optim::Rule::kAdamW)
      .value("adam", optim::Rule::kAdam)
      .value("adagrad", optim::Rule::kAdagrad)
      .value("lion", optim::Rule::kLion)
      .value("sgd", optim::Rule::kSgd);
  nb::enum_<optim::MomentFormat>(m, "MomentFormat", "How moments are kept.")
      .value("float32", optim::MomentFormat::kFloat32)
      .value("bfloat16", optim::MomentFormat::kBfloat16)
      .value("block8", optim::MomentFormat::kBlock8);
  nb::enum_<optim::Arrival>(m, "Arrival", "What becomes of what a buffer holds when more arrives.")
      .value("add", optim::Arrival::kAdd)
      .value("replace", optim::Arrival::kReplace);
  nb::class_<ThreadPool>(m, "ThreadPool",
                         "A fork-join pool; the calling thread counts as one of its threads.")
      .def(nb::init<int, const std::vector<int>&>(), "num_threads"_a, "cores"_a = std::vector<int>{})
      .def_prop_ro("num_threads", &ThreadPool::num_threads);
  m.def("step", &step, "pool"_a, "rule"_a, "param"_a, "param_dtype"_a, "companion"_a, "grad"_a,
        "grad_dtype"_a, "moment_format"_a, "moments"_a, "numel"_a, "scalars"_a, "first_index"_a, "seed"_a,
        "param_origin"_a = 0, "record_origin"_a = 0, "One pass of a rule over parameters of any dtype.");
  m.def("split_fp32", &split_fp32, "pool"_a, "source"_a, "param"_a, "remainder"_a, "numel"_a, ReleaseGil(),
        "float32 to bfloat16 and 16-bit remainder, exactly.");
  m.def("join_fp32", &join_fp32, "pool"_a, "param"_a, "remainder"_a, "target"_a, "numel"_a, ReleaseGil(),
        "bfloat16 and 16-bit remainder to float32: the inverse of split_fp32.");
  m.def("square_sums", &square_sums, "pool"_a, "grad"_a, "grad_dtype"_a, "numel"_a, "sums"_a, ReleaseGil(),
        "The float64 sum of squares of each block of BLOCK_NUMEL elements.");
  m.def("arrive", &arrive, "pool"_a, "arrival"_a, "target"_a, "target_dtype"_a, "source"_a, "source_dtype"_a,
        "numel"_a, "sums"_a, ReleaseGil(),
        "Adds to a buffer, or replaces it, and sums squares, in one pass.");
  m.def("exact_sum", &exact_sum, "values"_a, "numel"_a, ReleaseGil(),
        "The float64 sum of numbers of which none is negative, rounded once.");
  m.def("move_traffic", &move_traffic, "pool"_a, "streams"_a, "numel"_a,
        "Moves the bytes of a pass, (address, item bytes, written) for each array, and computes nothing.");
}

// --- I/O
// -------------------------------------------------------------------------------------------------------------

io::Ticket submit(io::Engine& engine, io::Operation operation, int fd, std::int64_t offset, Address address,
                  std::int64_t nbytes) {
  return engine.submit(operation, io::Extent{fd, offset, at<std::byte>(address), nbytes});
}

// In slices, so that Ctrl-C is answered although the disk is not. The ticket then stays valid: its transfer
// is still under way, and whoever cleans up waits for it again.
std::optional<double> wait(io::Engine& engine, io::Ticket ticket, double timeout_seconds) {
  using io::Clock;
  constexpr std::chrono::milliseconds kSlice{100};
  const std::chrono::duration<double> timeout{timeout_seconds};
  const Clock::time_point start = Clock::now();
  for (;;) {
    {
      const nb::gil_scoped_release released;
      const std::chrono::duration<double> left = timeout - (Clock::now() - start);
      const auto slice = left < kSlice ? std::chrono::ceil<std::chrono::milliseconds>(left) : kSlice;
      if (engine.wait_for(ticket, slice)) {
        return std::chrono::duration<double>(engine.wait(ticket).time_since_epoch()).count();
      }
      if (left <= kSlice) return std::nullopt;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

// Held by the module for as long as it lives, as is every exception type.
PyObject* io_failure_type = nullptr;

void raise_io_failure(const io::IoFailure& failure) {
  nb::object error = nb::handle(io_failure_type)(failure.what());
  error.attr("errno") = failure.error;
  error.attr("op") = io::operation_name(failure.operation);
  error.attr("fd") = failure.fd;
  error.attr("offset") = failure.offset;
  error.attr("length") = failure.length;
  error.attr("transferred") = failure.transferred;
  PyErr_SetObject(io_failure_type, error.ptr());
}

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const io::IoFailure& failure) {
    raise_io_failure(failure);
  } catch (const io::UnknownTicket& unknown) {
    PyErr_SetString(PyExc_KeyError, unknown.what());
  } catch (const std::system_error& refused) {
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(refused.code().value(), refused.what()).ptr());
  }
}

void bind_io(nb::module_& m) {
  io_failure_type =
      PyErr_NewExceptionWithDoc("zerooffload._native.IoFailure",
                                "A request that did not move all of its bytes.\n\n"
                                "errno is EIO at an unexpected end of file; transferred counts the bytes\n"
                                "from the start of the request that were moved.",
                                PyExc_Exception, nullptr);
  if (io_failure_type == nullptr) throw nb::python_error();
  m.attr("IoFailure") = nb::handle(io_failure_type);
  nb::register_exception_translator(translate, nullptr);

  nb::class_<io::Engine>(m, "Engine", "Moves bytes between files and memory.")
      .def(
          "submit_read",
          [](io::Engine& engine, int fd, std::int64_t offset, Address address, std::int64_t nbytes) {
            return submit(engine, io::Operation::kRead, fd, offset, address, nbytes);
          },
          "fd"_a, "offset"_a, "address"_a, "nbytes"_a, ReleaseGil(), "Queues a read; returns its ticket.")
      .def(
          "submit_write",
          [](io::Engine& engine, int fd, std::int64_t offset, Address address, std::int64_t nbytes) {
            return submit(engine, io::Operation::kWrite, fd, offset, address, nbytes);
          },
          "fd"_a, "offset"_a, "address"_a, "nbytes"_a, ReleaseGil(), "Queues a write; returns its ticket.")
      .def(
          "submit_flush",
          [](io::Engine& engine, int fd) { return submit(engine, io::Operation::kFlush, fd, 0, 0, 0); },
          "fd"_a, ReleaseGil(), "Queues a flush; returns its ticket.")
      .def("wait", &wait, "ticket"_a, "timeout_seconds"_a = std::numeric_limits<double>::infinity(),
           "Waits for a ticket; when its transfer is over, forgets it, and raises IoFailure if it failed. "
           "Returns when it was over.")
      .def(
          "done",
          [](io::Engine& engine, io::Ticket ticket) {
            return engine.wait_for(ticket, std::chrono::milliseconds{0});
          },
          "ticket"_a, ReleaseGil(), "Whether a ticket's transfer is over; the ticket stays valid.")
      .def(
          "register_memory",
          [](io::Engine& engine, Address address, std::int64_t nbytes) {
            return engine.register_memory(at<std::byte>(address), nbytes);
          },
          "address"_a, "nbytes"_a, ReleaseGil(),
          "Lets the kernel keep the pages of a range; returns 0 or an errno.")
      .def("close", &io::Engine::close, ReleaseGil(), "Finishes what was submitted and ends the threads.");

  nb::class_<io::ThreadEngine, io::Engine>(m, "ThreadEngine", "pread and pwrite on threads of its own.")
      .def(
          "__init__",
          [](io::ThreadEngine* self, int num_threads, std::int64_t piece_nbytes) {
            new (self) io::ThreadEngine(num_threads, piece_nbytes);
          },
          "num_threads"_a, "piece_nbytes"_a = io::kMostPieceNbytes);
  nb::class_<io::UringEngine, io::Engine>(m, "UringEngine", "io_uring, by one thread of its own.")
      .def(
          "__init__",
          [](io::UringEngine* self, int num_entries, std::int64_t piece_nbytes) {
            new (self) io::UringEngine(num_entries, piece_nbytes);
          },
          "num_entries"_a, "piece_nbytes"_a);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Kernels and I/O of zerooffload, without torch.";
  // nanobind would print at interpreter exit what it believes to be leaks: objects that still live in
  // globals.
  nb::set_leak_warnings(false);
  bind_cpu(m);
  bind_kernels(m);
  bind_io(m);
}
