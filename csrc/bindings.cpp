// The Python face of the native module: the only file that knows Python.
//
// Addresses come as integers (`tensor.data_ptr()`); the caller keeps what they point to alive. Every call
// that works or waits releases the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "base/thread_pool.hpp"
#include "cpu/target.hpp"
#include "io/failure.hpp"
#include "io/thread_engine.hpp"
#include "optim/adamw.hpp"
#include "optim/gradients.hpp"
#include "optim/master_weights.hpp"

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

void bind_scalars(nb::module_& m) {
  using optim::AdamWScalars;
  nb::class_<AdamWScalars>(m, "AdamWScalars", "Factors of one AdamW step; each rounded once to float32.")
      .def(
          "__init__",
          [](AdamWScalars* self, double grad_factor, double decay, double beta1, double one_minus_beta1,
             double beta2, double one_minus_beta2, double bias2_sqrt, double eps, double step_size) {
            const auto rounded = [](double value) { return static_cast<float>(value); };
            new (self) AdamWScalars{rounded(grad_factor),     rounded(decay), rounded(beta1),
                                    rounded(one_minus_beta1), rounded(beta2), rounded(one_minus_beta2),
                                    rounded(bias2_sqrt),      rounded(eps),   rounded(step_size)};
          },
          nb::kw_only(), "grad_factor"_a, "decay"_a, "beta1"_a, "one_minus_beta1"_a, "beta2"_a,
          "one_minus_beta2"_a, "bias2_sqrt"_a, "eps"_a, "step_size"_a)
      .def_ro("grad_factor", &AdamWScalars::grad_factor)
      .def_ro("decay", &AdamWScalars::decay)
      .def_ro("beta1", &AdamWScalars::beta1)
      .def_ro("one_minus_beta1", &AdamWScalars::one_minus_beta1)
      .def_ro("beta2", &AdamWScalars::beta2)
      .def_ro("one_minus_beta2", &AdamWScalars::one_minus_beta2)
      .def_ro("bias2_sqrt", &AdamWScalars::bias2_sqrt)
      .def_ro("eps", &AdamWScalars::eps)
      .def_ro("step_size", &AdamWScalars::step_size);
}

void adamw_fp32(ThreadPool& pool, Address param, Address exp_avg, Address exp_avg_sq, Address grad,
                Dtype grad_dtype, std::int64_t numel, const optim::AdamWScalars& scalars) {
  const optim::AdamWFp32Arrays arrays{at<float>(param), at<float>(exp_avg), at<float>(exp_avg_sq),
                                      at<const void>(grad)};
  optim::adamw_fp32(pool, arrays, grad_dtype, numel, scalars);
}

void adamw_bf16(ThreadPool& pool, Address param, Address remainder, Address exp_avg, Address exp_avg_sq,
                Address grad, Dtype grad_dtype, std::int64_t numel, const optim::AdamWScalars& scalars) {
  const optim::AdamWBf16Arrays arrays{at<std::uint16_t>(param), at<std::int16_t>(remainder),
                                      at<float>(exp_avg), at<float>(exp_avg_sq), at<const void>(grad)};
  optim::adamw_bf16(pool, arrays, grad_dtype, numel, scalars);
}

void split_fp32(ThreadPool& pool, Address source, Address param, Address remainder, std::int64_t numel) {
  optim::split_fp32(pool, at<const float>(source), at<std::uint16_t>(param), at<std::int16_t>(remainder),
                    numel);
}

void join_fp32(ThreadPool& pool, Address param, Address remainder, Address target, std::int64_t numel) {
  optim::join_fp32(pool, at<const std::uint16_t>(param), at<const std::int16_t>(remainder), at<float>(target),
                   numel);
}

void square_sums(ThreadPool& pool, Address grad, Dtype grad_dtype, std::int64_t numel, Address out) {
  optim::square_sums(pool, at<const void>(grad), grad_dtype, numel, at<double>(out));
}

void accumulate(ThreadPool& pool, Address target, Address source, Dtype dtype, std::int64_t numel) {
  optim::accumulate(pool, at<void>(target), at<const void>(source), dtype, numel);
}

void bind_kernels(nb::module_& m) {
  m.attr("BLOCK_NUMEL") = optim::kBlockNumel;
  nb::enum_<Dtype>(m, "Dtype", "Item types that the kernels know.")
      .value("float32", Dtype::kFloat32)
      .value("bfloat16", Dtype::kBfloat16);
  nb::class_<ThreadPool>(m, "ThreadPool",
                         "A fork-join pool; the calling thread counts as one of its threads.")
      .def(nb::init<int>(), "num_threads"_a)
      .def_prop_ro("num_threads", &ThreadPool::num_threads);
  bind_scalars(m);
  m.def("adamw_fp32", &adamw_fp32, "pool"_a, "param"_a, "exp_avg"_a, "exp_avg_sq"_a, "grad"_a, "grad_dtype"_a,
        "numel"_a, "scalars"_a, ReleaseGil(), "One fused AdamW pass over float32 parameters, in place.");
  m.def("adamw_bf16", &adamw_bf16, "pool"_a, "param"_a, "remainder"_a, "exp_avg"_a, "exp_avg_sq"_a, "grad"_a,
        "grad_dtype"_a, "numel"_a, "scalars"_a, ReleaseGil(),
        "One fused AdamW pass over bfloat16 parameters with 16-bit remainders, in place.");
  m.def("split_fp32", &split_fp32, "pool"_a, "source"_a, "param"_a, "remainder"_a, "numel"_a, ReleaseGil(),
        "float32 to bfloat16 and 16-bit remainder, exactly.");
  m.def("join_fp32", &join_fp32, "pool"_a, "param"_a, "remainder"_a, "target"_a, "numel"_a, ReleaseGil(),
        "bfloat16 and 16-bit remainder to float32: the inverse of split_fp32.");
  m.def("square_sums", &square_sums, "pool"_a, "grad"_a, "grad_dtype"_a, "numel"_a, "out"_a, ReleaseGil(),
        "The float64 sum of squares of each block of BLOCK_NUMEL elements.");
  m.def("accumulate", &accumulate, "pool"_a, "target"_a, "source"_a, "dtype"_a, "numel"_a, ReleaseGil(),
        "target += source, rounded once to their dtype.");
}

// --- I/O
// -------------------------------------------------------------------------------------------------------------

io::Ticket submit(io::ThreadEngine& engine, io::Operation operation, int fd, std::int64_t offset,
                  Address address, std::int64_t nbytes) {
  return engine.submit(operation, io::Extent{fd, offset, at<std::byte>(address), nbytes});
}

// In slices, so that Ctrl-C is answered although the disk is not. The ticket then stays valid: its transfer
// is still under way, and whoever cleans up waits for it again.
void wait(io::ThreadEngine& engine, io::Ticket ticket) {
  constexpr std::chrono::milliseconds kSlice{100};
  for (;;) {
    {
      const nb::gil_scoped_release released;
      if (engine.wait_for(ticket, kSlice)) {
        engine.wait(ticket);
        return;
      }
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

  nb::class_<io::ThreadEngine>(m, "ThreadEngine", "pread and pwrite on threads of its own.")
      .def(
          "__init__",
          [](io::ThreadEngine* self, int num_threads) { new (self) io::ThreadEngine(num_threads); },
          "num_threads"_a)
      .def(
          "submit_read",
          [](io::ThreadEngine& engine, int fd, std::int64_t offset, Address address, std::int64_t nbytes) {
            return submit(engine, io::Operation::kRead, fd, offset, address, nbytes);
          },
          "fd"_a, "offset"_a, "address"_a, "nbytes"_a, ReleaseGil(), "Queues a read; returns its ticket.")
      .def(
          "submit_write",
          [](io::ThreadEngine& engine, int fd, std::int64_t offset, Address address, std::int64_t nbytes) {
            return submit(engine, io::Operation::kWrite, fd, offset, address, nbytes);
          },
          "fd"_a, "offset"_a, "address"_a, "nbytes"_a, ReleaseGil(), "Queues a write; returns its ticket.")
      .def("wait", &wait, "ticket"_a, "Waits for a ticket, exactly once; raises IoFailure.")
      .def(
          "done",
          [](io::ThreadEngine& engine, io::Ticket ticket) {
            return engine.wait_for(ticket, std::chrono::milliseconds{0});
          },
          "ticket"_a, ReleaseGil(), "Whether a ticket's transfer is over; the ticket stays valid.")
      .def("close", &io::ThreadEngine::close, ReleaseGil(),
           "Finishes what was submitted and ends the threads.");
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
