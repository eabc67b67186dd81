// A stand-in for the device `neuron`: PrivateUse1 on host memory, every operator computed by the CPU's own kernel.
//
// It is strict where the CPU is not: operands must lie on one device with one index, because that is what a real device asks
// for and what a plain CPU fallback would hide. It is synchronous, so a missing synchronisation is not found.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include "host_alias.h"

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// --- which logical cores this process may use ----------------------------------------------------------------------------

std::atomic<int> g_num_cores{4};    // of this host
std::atomic<int> g_only_core{-1};   // in a launched process: the one that it drives; -1: any
std::atomic<bool> g_touched{false}; // whether anything has used the device
thread_local int t_current = -1;    // autograd has threads of its own

int current_core() {
  if (g_only_core >= 0) {
    return g_only_core;
  }
  return t_current >= 0 ? t_current : 0;
}

int checked_core(int index) {
  const int core = index < 0 ? current_core() : index;
  TORCH_CHECK(core < g_num_cores, "neuron:", core, " does not exist: this host has ", g_num_cores.load(), " logical cores");
  TORCH_CHECK(
      g_only_core < 0 || core == g_only_core, "neuron:", core, " belongs to another process; this one drives neuron:",
      g_only_core.load(), " (use an unindexed device)");
  return core;
}

// --- memory --------------------------------------------------------------------------------------------------------------

struct Memory {
  std::mutex mutex;
  int64_t allocated = 0;
  int64_t peak = 0;
} g_memory;

struct Block {
  void* data;
  size_t size;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> lock(g_memory.mutex);
    g_memory.allocated -= static_cast<int64_t>(block->size);
  }
  std::free(block->data);
  delete block;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    g_touched = true;
    const auto core = static_cast<c10::DeviceIndex>(checked_core(-1));
    void* data = nullptr;
    if (size > 0) {
      TORCH_CHECK(posix_memalign(&data, 64, size) == 0, "out of memory: ", size, " bytes");
      std::lock_guard<std::mutex> lock(g_memory.mutex);
      g_memory.allocated += static_cast<int64_t>(size);
      g_memory.peak = std::max(g_memory.peak, g_memory.allocated);
    }
    return {data, new Block{data, size}, &free_block, c10::Device(kDevice, core)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // a block's context is not its data
  }
  void copy_data(void* destination, const void* source, size_t count) const override {
    std::memcpy(destination, source, count);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(g_memory.mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* kind : {&stats.allocated_bytes[0], &stats.reserved_bytes[0]}) {
      kind->current = g_memory.allocated;
      kind->peak = g_memory.peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(g_memory.mutex);
    g_memory.peak = g_memory.allocated;
  }
} g_allocator;

REGISTER_ALLOCATOR(kDevice, &g_allocator);

// --- devices, streams and events: streams are numbers, events are times ----------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static thread_local c10::StreamId stream;

  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override {
    return {kDevice, static_cast<c10::DeviceIndex>(current_core())};
  }
  void setDevice(c10::Device device) const override {
    uncheckedSetDevice(device); // autograd calls this for every index that there is; what is used is checked when it is
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      t_current = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), stream);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), next++);
  }
  c10::Stream exchangeStream(c10::Stream other) const override {
    auto previous = stream;
    stream = other.id();
    return c10::Stream(c10::Stream::UNSAFE, other.device(), previous);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(g_num_cores.load());
  }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new double;
    }
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    *static_cast<double*>(*event) = std::chrono::duration<double, std::milli>(now).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<double*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    return *static_cast<double*>(second) - *static_cast<double*>(first);
  }

 private:
  static c10::Device with_index(c10::Device device) {
    return {kDevice, static_cast<c10::DeviceIndex>(device.index() < 0 ? current_core() : device.index())};
  }
};

thread_local c10::StreamId Guard::stream = 0;

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- random numbers: a seed and an offset, as DTensor's tracker expects ----------------------------------------------------

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = c10::Device(kDevice, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  void set_current_seed(uint64_t value) override {
    seed_ = value;
    offset_ = 0;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t value) override {
    offset_ = value;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    std::memcpy(state.data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "a state of 16 bytes is expected, got ", state.numel());
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  // Each draw begins a stream of its own; the first after a seed is the CPU's.
  uint64_t next_stream() {
    const auto result = seed_ + 0x9E3779B97F4A7C15ULL * offset_;
    offset_ += 4;
    return result;
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

at::Generator& default_generator(int core) {
  static std::map<int, at::Generator> generators;
  auto found = generators.find(core);
  if (found == generators.end()) {
    found = generators.emplace(core, at::make_generator<Generator>(static_cast<c10::DeviceIndex>(core))).first;
  }
  return found->second;
}

// --- what torch asks of an accelerator -------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(g_num_cores.load());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    g_touched = true;
    t_current = checked_core(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_core());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto previous = getCurrentDevice();
    t_current = checked_core(index);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(checked_core(index));
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(static_cast<c10::DeviceIndex>(checked_core(index)));
  }
  at::Device getDeviceFromPtr(void*) const override {
    return {kDevice, getCurrentDevice()};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto bytes = g_allocator.allocate(size);
    if (const auto kept = std::min(size, storage.nbytes()); kept > 0) {
      std::memcpy(bytes.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(bytes));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// --- operators -------------------------------------------------------------------------------------------------------------

py::object* g_on_first_use = nullptr; // called with an operator and its arguments' types, before it runs
std::mutex g_uses_mutex;
std::set<std::string> g_uses;
std::map<std::string, int64_t> g_executed;
thread_local int t_graphs = 0;  // compiled graphs that run: their operators are not compiled one by one
std::atomic<int64_t> g_reads{0}; // host reads of one element: each would wait for the device

void note_use(const std::string& name, const std::string& arguments) {
  if (t_graphs > 0) {
    return;
  }
  {
    std::lock_guard<std::mutex> lock(g_uses_mutex);
    ++g_executed[name];
    if (!g_uses.insert(name + arguments).second) {
      return;
    }
  }
  if (g_on_first_use != nullptr) {
    py::gil_scoped_acquire gil;
    (*g_on_first_use)(name, arguments);
  }
}

// Looks at the operands of one call: where they are, and of which types and shapes.
class Operands {
 public:
  explicit Operands(std::string name) : name_(std::move(name)) {}

  void add(const at::Tensor& tensor, bool is_index = false) {
    if (!tensor.defined()) {
      return;
    }
    if (tensor.is_privateuseone()) {
      const int core = tensor.device().index();
      TORCH_CHECK(core_ < 0 || core_ == core, name_, ": operands on neuron:", core_, " and neuron:", core);
      core_ = core;
    } else if (tensor.is_cpu() && tensor.dim() > 0) {
      (is_index ? index_on_host_ : on_host_) = true;
    }
    text_ << ' ' << tensor.scalar_type() << tensor.sizes();
  }

  // As CUDA does, the device takes index lists from the host; nothing else.
  void check() const {
    const bool may_mix = name_ == "aten::index" || name_ == "aten::index_put_" || name_ == "aten::_index_put_impl_";
    TORCH_CHECK(
        core_ < 0 || !(on_host_ || (index_on_host_ && !may_mix)), name_,
        ": expected all operands on one device, got neuron and cpu; move the host tensor to the device");
  }

  std::string text() const {
    return text_.str();
  }

 private:
  std::string name_;
  int core_ = -1;
  bool on_host_ = false;
  bool index_on_host_ = false;
  std::ostringstream text_;
};

bool draws_random_numbers(const c10::OperatorHandle& op) {
  for (const auto& tag : op.getTags()) {
    if (tag == at::Tag::nondeterministic_seeded) {
      return true;
    }
  }
  return false;
}

// Seeds the CPU's generator for as long as it lives, and puts back what that had, also after an error.
struct LentGenerator {
  explicit LentGenerator(uint64_t seed) : host(at::detail::getDefaultCPUGenerator()), state(host.get_state()) {
    host.set_current_seed(seed);
  }
  ~LentGenerator() {
    host.set_state(state);
  }
  at::Generator host;
  at::Tensor state;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  Operands operands(schema.name());
  at::Generator generator;
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      operands.add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        operands.add(tensor);
      }
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        operands.add(tensor.value_or(at::Tensor()), true);
      }
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
      TORCH_CHECK(
          generator.device().type() == kDevice, schema.name(), ": expected a generator of device neuron, got one of ",
          generator.device().type());
      value = c10::IValue(); // the CPU's kernel is to take the CPU's
    }
  }
  operands.check();
  note_use(schema.name(), operands.text());
  if (!draws_random_numbers(op)) {
    at::native::cpu_fallback(op, stack);
    return;
  }
  // The CPU's kernel draws from the CPU's generator: lend it our stream, and put back what it had.
  if (!generator.defined()) {
    generator = default_generator(current_core());
  }
  const LentGenerator lent(static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next_stream());
  at::native::cpu_fallback(op, stack);
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(
      !format.has_value() || *format == at::MemoryFormat::Contiguous || *format == at::MemoryFormat::Preserve,
      "neuron: only the contiguous memory format is supported, got ", *format);
  checked_core(device.has_value() ? device->index() : -1);
  const c10::DeviceGuard guard(device.value_or(c10::Device(kDevice)));
  return at::detail::empty_generic(
      size, &g_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  checked_core(device.has_value() ? device->index() : -1);
  const c10::DeviceGuard guard(device.value_or(c10::Device(kDevice)));
  return at::detail::empty_strided_generic(
      size, stride, &g_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool) {
  host_alias(destination).copy_(host_alias(self));
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  ++g_reads;
  return host_alias(self).item();
}

at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor& set_storage_at(
    at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_storage_offset(offset);
  if (stride.empty()) { // as set_(storage) and storage.resize_ call it
    tensor->set_sizes_contiguous(size);
  } else {
    tensor->set_sizes_and_strides(size, stride);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage_at(self, std::move(storage), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("as_strided", as_strided);
  m.impl("resize_", at::native::resize_);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

} // namespace

namespace at::native {

// There is no fused attention here: the plain one is taken apart into operators.
int64_t choose_plain_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_plain_attention)

} // namespace at::native

// Without kernels of its own an autocast region would fail, or with a fallthrough alone silently stay fp32.
namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_OUT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_OUT)
  AT_FORALL_PROMOTE(WIDEST)
}

} // namespace at::autocast

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_hooks", [] {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
  });
  m.def("set_cores", [](int count, int only) {
    g_num_cores = count;
    g_only_core = only;
  });
  m.def("touched", [] { return g_touched.load(); });
  m.def("set_device", [](int index) {
    g_touched = true;
    t_current = checked_core(index);
  });
  m.def("current_device", [] { return current_core(); });
  m.def("device_count", [] { return g_num_cores.load(); });
  m.def("default_generator", [](int index) { return default_generator(checked_core(index)); });
  m.def("on_first_use", [](py::object callback) { g_on_first_use = new py::object(std::move(callback)); });
  m.def("executed", [] {
    std::lock_guard<std::mutex> lock(g_uses_mutex);
    return g_executed;
  });
  m.def("clear_executed", [] {
    std::lock_guard<std::mutex> lock(g_uses_mutex);
    g_executed.clear();
  });
  m.def("enter_graph", [] { ++t_graphs; });
  m.def("leave_graph", [] { --t_graphs; });
  m.def("host_reads", [] { return g_reads.load(); });
}
