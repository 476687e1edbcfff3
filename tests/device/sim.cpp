/* A simulated accelerator, "sim", for tests: two devices whose kernels are those of the CPU.

   Memory. A device's address lies in a range that nobody may read or write: an access from the host is a fault, which is
   noted as a violation with the functions that led to it. The same pages are mapped a second time, where kernels and
   copies work. So a kernel needs no copy, and the protection needs no system call, and holds also while another thread
   runs a kernel.

   Order. A kernel runs at once, but its result counts as there only for what is ordered behind it: work of the same
   stream, what waits for an event behind it, and the host when it has waited. Each stream and the host have a vector
   clock, each allocation knows who used which of its bytes, and a use that is not ordered is an error. A copy to the host
   that does not block arrives when the host waits for it.

   As on CUDA: a kernel runs on the current stream of its tensors' device, freed memory belongs to the stream on which it
   was allocated, and what does not fit raises OutOfMemoryError. Random numbers come from the generator of the CPU, so
   that a run has the numbers of the same run on the CPU. */

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

namespace at::autocast { /* of ATen/autocast_mode.h, which includes all of ATen */
TORCH_API Tensor cached_cast(ScalarType to, const Tensor &tensor, DeviceType device);
TORCH_API ScalarType get_autocast_dtype(DeviceType device);
} // namespace at::autocast

extern "C" { /* of Python.h: whoever loads this is Python */
int PyGILState_Check(void);
void *PyEval_SaveThread(void);
void PyEval_RestoreThread(void *);
}

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using torch::jit::Stack;

namespace {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2, STREAMS = 8; /* of a device; the first is its default stream */
constexpr size_t PAGE = 4096, DEVICE_BYTES = size_t(1) << 36;

/* ---- Counts ---- */

enum Count { LAUNCHES, TO_HOST, TO_DEVICE, WAITS, COUNTS };
std::atomic<long> counts[COUNTS];
std::mutex waits_lock;
std::map<long, long> waits_of_threads;
std::vector<std::string> violations; /* what could not be raised where it happened; under `state` */

void count_wait() {
    counts[WAITS]++;
    std::lock_guard<std::mutex> guard(waits_lock);
    waits_of_threads[gettid()]++;
}

/* ---- Order ---- */

typedef std::array<uint64_t, DEVICES * STREAMS> Clock;

std::mutex state;                        /* over clocks, allocations and pending copies; held for moments */
std::recursive_mutex running[DEVICES];   /* held while a kernel of the device runs: a host that waits, waits for it */

/* Runs a kernel, or waits for the one that runs. A kernel may need Python's lock, for a tensor that Python knows: so
   nobody waits here with that lock. */
struct Running {
    explicit Running(int device) : mutex(running[device]) {
        if (mutex.try_lock()) return;
        void *thread = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
        mutex.lock();
        if (thread != nullptr) PyEval_RestoreThread(thread);
    }
    ~Running() { mutex.unlock(); }
    Running(const Running &) = delete;
    std::recursive_mutex &mutex;
};

std::array<Clock, DEVICES * STREAMS> clocks;
Clock host;                              /* what the host has waited for, on any thread */
thread_local DeviceIndex current_device;
thread_local std::array<int, DEVICES> current_streams;

void merge(Clock &clock, const Clock &other) {
    for (size_t at = 0; at < clock.size(); at++) clock[at] = std::max(clock[at], other[at]);
}

struct Use {
    size_t begin, end;
    int stream;
    uint64_t time;
    bool writes;
};

struct Block { /* an allocation */
    DeviceIndex device;
    int stream; /* on which it was allocated */
    size_t offset, bytes;
    std::vector<Use> uses;
    std::set<int> recorded; /* streams that the program has named by record_stream */
};

bool is_known(const Use &use, const Clock &clock) { return use.time <= clock[use.stream]; }

/* Notes that a stream uses bytes of an allocation now. Returns what the use is not ordered behind; empty: nothing. */
std::string use(Block *block, size_t begin, size_t end, int stream, bool writes) {
    Clock &now = clocks[stream];
    std::string problem;
    std::vector<Use> left;
    for (const Use &other : block->uses) {
        bool overlaps = other.begin < end && begin < other.end;
        if (overlaps && (writes || other.writes) && !is_known(other, now))
            problem = std::string(writes ? "a write" : "a read") + " on stream " + std::to_string(stream) +
                      " is not ordered behind a " + (other.writes ? "write" : "read") + " on stream " +
                      std::to_string(other.stream);
        bool is_replaced = begin <= other.begin && other.end <= end && is_known(other, now) &&
                           (writes || (!other.writes && other.stream == stream));
        if (!is_replaced && !is_known(other, host)) left.push_back(other);
    }
    left.push_back({begin, end, stream, now[stream], writes});
    block->uses = std::move(left);
    return problem;
}

/* ---- Memory ---- */

char *device_memory, *kernel_memory; /* the same pages twice */
size_t capacity[DEVICES], allocated[DEVICES], peak[DEVICES], top[DEVICES];
std::map<size_t, std::vector<size_t>> unused[DEVICES]; /* offsets by size */
std::map<size_t, Block *> blocks; /* by offset; under `state` */

void open_memory() {
    int file = memfd_create("sim", MFD_CLOEXEC);
    size_t bytes = DEVICES * DEVICE_BYTES;
    TORCH_CHECK(file >= 0 && ftruncate(file, bytes) == 0, "sim: no memory can be mapped");
    device_memory = (char *)mmap(nullptr, bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    kernel_memory = (char *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(device_memory != MAP_FAILED && kernel_memory != MAP_FAILED, "sim: no memory can be mapped");
    madvise(device_memory, bytes, MADV_DONTFORK); /* a fork has no device, as on CUDA */
    madvise(kernel_memory, bytes, MADV_DONTFORK);
    madvise(kernel_memory, bytes, MADV_DONTDUMP);
    close(file);
    for (size_t &limit : capacity) limit = size_t(16) << 30;
}

bool is_device_address(const void *address) {
    return (char *)address >= device_memory && (char *)address < device_memory + DEVICES * DEVICE_BYTES;
}

/* Returns where kernels find what lies at an address of a device. */
char *for_kernels(const void *address) {
    return address == nullptr ? nullptr : kernel_memory + ((char *)address - device_memory);
}

/* A fault in memory of a device: the page is opened, so that the program goes on, and the test fails in the end. */
struct sigaction action_before;
std::atomic<long> faults;

void on_fault(int number, siginfo_t *info, void *context) {
    if (!is_device_address(info->si_addr)) { /* not ours: the fault comes again, to whom it would have come */
        sigaction(SIGSEGV, &action_before, nullptr);
        return;
    }
    faults++;
    void *frames[32];
    static const char text[] = "sim: the host touches memory of a device in:\n";
    ssize_t ignored = write(2, text, sizeof text - 1);
    (void)ignored;
    backtrace_symbols_fd(frames, backtrace(frames, 32), 2);
    mprotect((void *)((uintptr_t)info->si_addr / PAGE * PAGE), PAGE, PROT_READ | PROT_WRITE);
}

void notice_faults() {
    void *frames[1];
    backtrace(frames, 1); /* it loads a library, which a handler must not */
    struct sigaction action = {};
    action.sa_sigaction = &on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &action_before);
}

int index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }
int stream_of(int device) { return device * STREAMS + current_streams[device]; }

void release(void *context) {
    auto *block = (Block *)context;
    std::lock_guard<std::mutex> guard(state);
    for (const Use &use : block->uses)
        if (use.stream != block->stream && !is_known(use, clocks[block->stream]) && !is_known(use, host) &&
            !block->recorded.count(use.stream))
            violations.push_back("memory of stream " + std::to_string(block->stream) +
                                 " was freed, which stream " + std::to_string(use.stream) +
                                 " may still use: record_stream() was not called");
    char *memory = kernel_memory + block->offset;
    size_t pages = (block->bytes + PAGE - 1) / PAGE * PAGE;
    if (pages <= 16 * PAGE) memset(memory, 0xFF, pages); /* who reads it now reads NaN */
    else madvise(memory, pages, MADV_REMOVE);
    allocated[block->device] -= pages;
    unused[block->device][pages].push_back(block->offset);
    blocks.erase(block->offset);
    delete block;
}

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device, bytes); }
    c10::DataPtr allocate_on(int device, size_t bytes) {
        if (bytes == 0) return {nullptr, Device(SIM, device)};
        size_t pages = (bytes + PAGE - 1) / PAGE * PAGE;
        std::lock_guard<std::mutex> guard(state);
        TORCH_CHECK_WITH(OutOfMemoryError, allocated[device] + pages <= capacity[device],
                         "sim:", device, " out of memory. Tried to allocate ", bytes, " bytes; ", allocated[device], " of ",
                         capacity[device], " are in use.");
        std::vector<size_t> &fitting = unused[device][pages];
        size_t offset;
        if (fitting.empty()) {
            TORCH_CHECK_WITH(OutOfMemoryError, top[device] + pages <= DEVICE_BYTES, "sim: no addresses are left");
            offset = device * DEVICE_BYTES + top[device];
            top[device] += pages;
        } else {
            offset = fitting.back();
            fitting.pop_back();
        }
        allocated[device] += pages;
        peak[device] = std::max(peak[device], allocated[device]);
        auto *block = blocks[offset] = new Block{(DeviceIndex)device, stream_of(device), offset, bytes, {}, {}};
        return {device_memory + offset, block, &release, Device(SIM, device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void *to, const void *from, size_t bytes) const override {
        memcpy(for_kernels(to), for_kernels(from), bytes);
    }
};
Allocator &allocator = *new Allocator();

/* Returns the allocation in which an address lies, or nothing. A storage need not own its memory: one that is written to a
   file is read through another. Call it under `state`. */
Block *block_at(const char *address) {
    auto after = blocks.upper_bound(address - device_memory);
    if (!is_device_address(address) || after == blocks.begin()) return nullptr;
    Block *block = std::prev(after)->second;
    return address < device_memory + block->offset + block->bytes ? block : nullptr;
}

/* ---- Waiting ---- */

struct Arriving { /* a copy to the host that has not arrived yet */
    int stream;
    uint64_t time;
    at::Tensor to, content;
};
std::vector<Arriving> arriving;

/* The host has waited for these clocks. */
void have_waited(const Clock &clock) {
    std::vector<Arriving> arrived, late;
    {
        std::lock_guard<std::mutex> guard(state);
        merge(host, clock);
        for (Arriving &copy : arriving) (copy.time <= host[copy.stream] ? arrived : late).push_back(std::move(copy));
        arriving.swap(late);
    }
    for (Arriving &copy : arrived) copy.to.copy_(copy.content);
}

Clock clock_of(int stream) {
    std::lock_guard<std::mutex> guard(state);
    return clocks[stream];
}

void wait_for_stream(int stream) {
    { Running wait(stream / STREAMS); }
    have_waited(clock_of(stream));
}

void wait_for_device(int device) {
    { Running wait(device); }
    for (int stream = 0; stream < STREAMS; stream++) have_waited(clock_of(device * STREAMS + stream));
}

/* ---- Devices, streams and events ---- */

struct Event {
    Clock clock;
    int stream;
};

void check_device(int device) {
    TORCH_CHECK(0 <= device && device < DEVICES, "sim: there is no device ", device, ", but ", DEVICES, " devices");
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static constexpr c10::DeviceType static_type = SIM;
    c10::DeviceType type() const override { return SIM; }
    Device exchangeDevice(Device device) const override {
        Device before = getDevice();
        setDevice(device);
        return before;
    }
    Device getDevice() const override { return {SIM, current_device}; }
    void setDevice(Device device) const override {
        check_device(device.index());
        current_device = device.index();
    }
    void uncheckedSetDevice(Device device) const noexcept override {
        if (device.index() >= 0) current_device = device.index();
    }
    static Stream stream(int device, int number) {
        return Stream(Stream::UNSAFE, Device(SIM, device), number);
    }
    static int number(const Stream &stream) {
        check_device(stream.device_index());
        TORCH_CHECK(stream.device_type() == SIM && stream.id() < STREAMS, "sim: there is no such stream");
        return stream.device_index() * STREAMS + (int)stream.id();
    }
    Stream getStream(Device device) const override {
        check_device(index_of(device));
        return stream(index_of(device), current_streams[index_of(device)]);
    }
    Stream getDefaultStream(Device device) const override {
        check_device(index_of(device));
        return stream(index_of(device), 0);
    }
    Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
    Stream getNewStream(Device device, int) const override {
        static std::atomic<unsigned> next{0};
        check_device(index_of(device));
        return stream(index_of(device), 1 + (int)(next++ % (STREAMS - 1)));
    }
    Stream exchangeStream(Stream wanted) const override {
        number(wanted);
        Stream before = getStream(wanted.device());
        current_streams[wanted.device_index()] = (int)wanted.id();
        return before;
    }
    void *getStreamNativeHandle(const Stream stream) const override {
        return (void *)(uintptr_t)((stream.device_index() + 1) * 0x1000 + stream.id() * 0x10);
    }
    DeviceIndex deviceCount() const noexcept override { return DEVICES; }
    void record(void **event, const Stream &stream, DeviceIndex device, c10::EventFlag) const override {
        TORCH_CHECK(device == -1 || device == stream.device_index(), "sim: an event of device ", (int)device,
                    " cannot be recorded on a stream of device ", (int)stream.device_index());
        if (*event == nullptr) *event = new Event();
        *(Event *)*event = {clock_of(number(stream)), number(stream)};
    }
    void block(void *event, const Stream &stream) const override {
        if (event == nullptr) return;
        std::lock_guard<std::mutex> guard(state);
        merge(clocks[number(stream)], ((Event *)event)->clock);
    }
    bool queryEvent(void *event) const override {
        if (event != nullptr) have_waited(((Event *)event)->clock);
        return true;
    }
    void destroyEvent(void *event, DeviceIndex) const noexcept override { delete (Event *)event; }
    bool queryStream(const Stream &stream) const override {
        wait_for_stream(number(stream));
        return true;
    }
    void synchronizeStream(const Stream &stream) const override {
        count_wait();
        wait_for_stream(number(stream));
    }
    void synchronizeEvent(void *event) const override {
        count_wait();
        if (event != nullptr) have_waited(((Event *)event)->clock);
    }
    void synchronizeDevice(DeviceIndex device) const override {
        count_wait();
        check_device(device < 0 ? current_device : device);
        wait_for_device(device < 0 ? current_device : device);
    }
    void recordDataPtrOnStream(const c10::DataPtr &data, const Stream &stream) const override {
        if (data.get_deleter() != &release) return;
        std::lock_guard<std::mutex> guard(state);
        ((Block *)data.get_context())->recorded.insert(number(stream));
    }
    double elapsedTime(void *, void *, DeviceIndex) const override { return 0; }
};

struct OnDevice { /* makes a device current */
    explicit OnDevice(int device) : before(current_device) { current_device = (DeviceIndex)device; }
    ~OnDevice() { current_device = before; }
    DeviceIndex before;
};

/* ---- Kernels ---- */

void check(const std::string &problem) { TORCH_CHECK(problem.empty(), "sim: ", problem); }

/* Notes that the current stream of a tensor's device uses the tensor. */
void use(const at::Tensor &tensor, int stream, bool writes) {
    if (tensor.numel() == 0) return;
    size_t extent = 1;
    for (int64_t dim = 0; dim < tensor.dim(); dim++) extent += (tensor.size(dim) - 1) * tensor.stride(dim);
    auto *data = (const char *)tensor.storage().data() + tensor.storage_offset() * tensor.itemsize();
    std::string problem = "a kernel uses a tensor without memory";
    {
        std::lock_guard<std::mutex> guard(state);
        if (Block *block = block_at(data)) {
            size_t begin = data - device_memory - block->offset;
            problem = use(block, begin, begin + extent * tensor.itemsize(), stream, writes);
        }
    }
    check(problem);
}

/* A launch begins: what the host knows is ordered before it. */
void begin_launch(int stream) {
    std::lock_guard<std::mutex> guard(state);
    merge(clocks[stream], host);
    clocks[stream][stream]++;
}

c10::Storage new_storage(int device, size_t bytes) {
    return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                 allocator.allocate_on(device, bytes), &allocator, true);
}

at::Tensor shaped(at::Tensor tensor, const at::Tensor &like) {
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    impl->_set_conj(like.is_conj());
    impl->_set_neg(like.is_neg());
    return tensor;
}

at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor &like) {
    return shaped(at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype()), like);
}

/* In inference mode, too, a view of an ordinary tensor is an ordinary tensor. */
at::Tensor view_of(const at::Tensor &base, const at::Tensor &like) {
    return shaped(at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                           base.key_set(), like.dtype()), like);
}

/* Has the storage of a device so many bytes, and keeps its content. */
void resize_storage(c10::StorageImpl *storage, size_t bytes) {
    c10::DataPtr data = allocator.allocate_on(storage->device().index(), bytes);
    size_t kept = std::min(bytes, storage->nbytes());
    if (kept) memcpy(for_kernels(data.get()), for_kernels(storage->data()), kept);
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(bytes);
}

/* One call of a kernel of the CPU with tensors of a device. */
struct Call {
    struct Argument {
        at::Tensor ours, given; /* on the CPU, and on the device */
        bool writes;
    };
    int device = -1;
    std::vector<Argument> arguments;
    std::unordered_map<const c10::StorageImpl *, c10::Storage> on_cpu;
    std::unordered_map<const c10::StorageImpl *, at::Tensor> on_device;
    std::vector<at::Tensor> kept;

    at::Tensor on_host(const at::Tensor &tensor, bool writes) {
        if (!tensor.defined() || tensor.device().type() != SIM) return tensor;
        TORCH_CHECK(device == -1 || device == tensor.device().index(), "Expected all tensors to be on the same device, but "
                    "found at least two devices, sim:", device, " and sim:", (int)tensor.device().index(), "!");
        device = tensor.device().index();
        at::Tensor ours = tensor_over(storage_on_host(tensor), c10::DispatchKey::CPU, tensor);
        arguments.push_back({ours, tensor, writes});
        return ours;
    }
    const c10::Storage &storage_on_host(const at::Tensor &tensor) {
        const c10::Storage &storage = tensor.storage();
        c10::Storage &ours = on_cpu[storage.unsafeGetStorageImpl()];
        if (!ours) {
            c10::DataPtr data(for_kernels(storage.data()), Device(c10::DeviceType::CPU));
            ours = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                         std::move(data), c10::GetAllocator(c10::DeviceType::CPU), true);
            on_device.emplace(ours.unsafeGetStorageImpl(), tensor);
        }
        return ours;
    }
    /* Outputs of a new storage lie on the device, those over an argument's storage are views of it. */
    at::Tensor returned(const at::Tensor &output, int stream) {
        if (!output.defined()) return output;
        for (const Argument &argument : arguments)
            if (argument.ours.is_same(output)) return argument.given;
        if (!output.device().is_cpu() || output.layout() != c10::kStrided) return output;
        c10::StorageImpl *from = output.storage().unsafeGetStorageImpl();
        auto found = on_device.find(from);
        if (found != on_device.end()) return view_of(found->second, output);
        if (output._is_zerotensor()) return zeros_without_memory(output);
        c10::Storage storage = new_storage(device, from->nbytes());
        if (from->nbytes()) memcpy(for_kernels(storage.data()), from->data(), from->nbytes());
        at::Tensor made = tensor_over(storage, c10::DispatchKey::PrivateUse1, output);
        on_device.emplace(from, made);
        kept.push_back(output); /* so that no other storage has its address */
        use(made, stream, true);
        return made;
    }

    at::Tensor zeros_without_memory(const at::Tensor &like) const {
        c10::Storage none = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), like.storage().nbytes(),
                                                                  c10::DataPtr(nullptr, Device(SIM, device)), nullptr, false);
        c10::DispatchKeySet keys({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor});
        return shaped(at::detail::make_tensor<c10::TensorImpl>(std::move(none), keys, like.dtype()), like);
    }

    /* An argument that the kernel has resized has its new size on the device, too. */
    void resize_arguments() {
        for (const Argument &argument : arguments) {
            c10::StorageImpl *ours = argument.ours.storage().unsafeGetStorageImpl();
            c10::StorageImpl *given = argument.given.storage().unsafeGetStorageImpl();
            if (!argument.writes) continue;
            if (ours->nbytes() > given->nbytes()) {
                resize_storage(given, ours->nbytes());
                memcpy(for_kernels(given->data()), ours->data(), ours->nbytes());
            }
            if (argument.ours.sizes() != argument.given.sizes() || argument.ours.strides() != argument.given.strides())
                argument.given.unsafeGetTensorImpl()->set_sizes_and_strides(argument.ours.sizes(), argument.ours.strides(),
                                                                            argument.ours.storage_offset());
        }
    }
};

bool writes(const c10::Argument &argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

/* Whether an op has a kernel at all: one that only makes views, or looks at shapes, has none. */
bool launches(const c10::FunctionSchema &schema) {
    static const std::set<std::string> without = {"aten::_fused_sdp_choice", "aten::is_set_to", "aten::resize_"};
    if (without.count(schema.name())) return false;
    for (const c10::Argument &argument : schema.arguments())
        if (writes(argument)) return true;
    for (const c10::Argument &output : schema.returns())
        if (!output.alias_info()) return true;
    return schema.returns().empty();
}

bool has_mask(const std::vector<Call::Argument> &arguments) {
    for (size_t at = 1; at < arguments.size(); at++)
        if (arguments[at].given.scalar_type() == at::kBool || arguments[at].given.scalar_type() == at::kByte) return true;
    return false;
}

/* Whether the host has to know what the kernel finds, as the size of its output. */
bool waits(const c10::OperatorHandle &op, const Call &call) {
    if (op.hasTag(at::Tag::data_dependent_output)) return true;
    if (!op.hasTag(at::Tag::dynamic_output_shape)) return false;
    return op.schema().name().rfind("aten::index", 0) != 0 || has_mask(call.arguments);
}

/* Tensors of the host may take part as numbers, as indices, and as the counts of steps of an optimizer. */
void check_host_tensor(const at::Tensor &tensor, const c10::FunctionSchema &schema) {
    if (!tensor.defined() || tensor.device().type() == SIM || tensor.dim() == 0 || tensor.numel() == 0) return;
    bool is_index = schema.name().find("index") != std::string::npos && tensor.scalar_type() == at::kLong;
    TORCH_CHECK(is_index, "Expected all tensors to be on the same device, but found at least two devices, sim and ",
                tensor.device(), "! (when ", schema.name(), " was called)");
}

void run_kernel(const c10::OperatorHandle &op, Stack *stack) {
    const c10::FunctionSchema &schema = op.schema();
    size_t count = schema.arguments().size(), first = stack->size() - count;
    Call call;
    std::vector<at::Tensor> others;
    auto convert = [&](const at::Tensor &tensor, bool is_written) {
        if (tensor.defined() && tensor.device().type() != SIM) others.push_back(tensor);
        return call.on_host(tensor, is_written);
    };
    int wanted = -1;
    for (size_t at = 0; at < count; at++) {
        c10::IValue &value = (*stack)[first + at];
        bool is_written = writes(schema.arguments()[at]);
        if (value.isTensor()) {
            value = convert(value.toTensor(), is_written);
        } else if (value.isTensorList()) {
            std::vector<at::Tensor> tensors = value.toTensorVector();
            for (at::Tensor &tensor : tensors) tensor = convert(tensor, is_written);
            value = c10::IValue(c10::List<at::Tensor>(tensors));
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> tensors;
            for (std::optional<at::Tensor> tensor : value.toOptionalTensorList().vec())
                tensors.push_back(tensor ? std::optional<at::Tensor>(convert(*tensor, is_written)) : std::nullopt);
            value = c10::IValue(tensors);
        } else if (value.isDevice() && value.toDevice().type() == SIM) {
            wanted = index_of(value.toDevice());
            value = c10::IValue(Device(c10::DeviceType::CPU));
        }
    }
    if (call.device == -1) call.device = wanted == -1 ? current_device : wanted;
    else
        for (const at::Tensor &tensor : others) check_host_tensor(tensor, schema);
    OnDevice guard(call.device);
    int stream = stream_of(call.device);
    {
        Running runs(call.device);
        if (launches(schema)) {
            counts[LAUNCHES]++;
            begin_launch(stream);
            for (const Call::Argument &argument : call.arguments) use(argument.given, stream, argument.writes);
        }
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    if (launches(schema) && waits(op, call)) {
        count_wait();
        counts[TO_HOST]++;
        wait_for_stream(stream);
    }
    call.resize_arguments();
    for (size_t at = stack->size() - schema.returns().size(); at < stack->size(); at++) {
        c10::IValue &value = (*stack)[at];
        if (value.isTensor()) {
            value = call.returned(value.toTensor(), stream);
        } else if (value.isTensorList()) {
            std::vector<at::Tensor> tensors = value.toTensorVector();
            for (at::Tensor &tensor : tensors) tensor = call.returned(tensor, stream);
            value = c10::IValue(c10::List<at::Tensor>(tensors));
        }
    }
}

/* ---- Copies ---- */

at::Tensor on_host(const at::Tensor &tensor) {
    Call call;
    return call.on_host(tensor, false);
}

void copy_to_host(const at::Tensor &from, const at::Tensor &to, bool is_async) {
    int stream = stream_of(from.device().index());
    counts[TO_HOST]++;
    begin_launch(stream);
    use(from, stream, false);
    if (!is_async) {
        count_wait();
        wait_for_stream(stream);
        to.copy_(on_host(from));
        return;
    }
    Arriving copy{stream, 0, to, on_host(from).clone()}; /* which may need Python's lock */
    std::lock_guard<std::mutex> guard(state);
    copy.time = clocks[stream][stream];
    arriving.push_back(std::move(copy));
}

void copy_to_device(const at::Tensor &from, const at::Tensor &to) {
    int stream = stream_of(to.device().index());
    counts[TO_DEVICE]++;
    begin_launch(stream);
    use(to, stream, true);
    Running runs(to.device().index());
    on_host(to).copy_(from);
}

/* A copy between devices runs on the stream of the source, and the streams of both wait for each other. */
void copy_on_devices(const at::Tensor &from, const at::Tensor &to) {
    int stream = stream_of(from.device().index()), other = stream_of(to.device().index());
    counts[LAUNCHES]++;
    begin_launch(stream);
    if (other != stream) {
        std::lock_guard<std::mutex> guard(state);
        merge(clocks[stream], clocks[other]);
    }
    use(from, stream, false);
    use(to, stream, true);
    {
        Running runs(from.device().index());
        on_host(to).copy_(on_host(from));
    }
    std::lock_guard<std::mutex> guard(state);
    merge(clocks[other], clocks[stream]);
}

at::Tensor copy_from(const at::Tensor &from, const at::Tensor &to, bool is_async) {
    if (from._is_zerotensor()) to.zero_();
    else if (to.device().type() != SIM) copy_to_host(from, to, is_async);
    else if (from.device().type() != SIM) copy_to_device(from, to);
    else copy_on_devices(from, to);
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor &from, const at::Tensor &to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor &tensor) {
    int stream = stream_of(tensor.device().index());
    counts[TO_HOST]++;
    begin_launch(stream);
    use(tensor, stream, false);
    count_wait();
    wait_for_stream(stream);
    return on_host(tensor).item();
}

/* ---- What belongs to tensors rather than to kernels ---- */

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    OnDevice guard(device ? index_of(*device) : current_device);
    check_device(current_device);
    return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
    OnDevice guard(device ? index_of(*device) : current_device);
    check_device(current_device);
    return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

at::Tensor &set_storage(at::Tensor &tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->set_storage_offset(offset);
    if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride, offset);
    else impl->set_sizes_contiguous(size);
    return tensor;
}

at::Tensor &set_whole_storage(at::Tensor &tensor, at::Storage storage) {
    int64_t numel = storage.nbytes() / tensor.itemsize();
    return set_storage(tensor, std::move(storage), 0, numel, {});
}

at::Tensor &set_nothing(at::Tensor &tensor) {
    return set_storage(tensor, new_storage(tensor.device().index(), 0), 0, {0}, {});
}

at::Tensor &set_tensor(at::Tensor &tensor, const at::Tensor &source) {
    return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor &tensor, Stream stream) {
    Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

/* ---- Autocast, as on the CPU: these ops run in the lower precision ---- */

void run_in_lower_precision(const c10::OperatorHandle &op, Stack *stack) {
    c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
    at::ScalarType dtype = at::autocast::get_autocast_dtype(SIM);
    size_t count = op.schema().arguments().size(), first = stack->size() - count;
    for (size_t at = stack->size(); at-- > first;) /* the last one first, as there */
        if ((*stack)[at].isTensor() && (*stack)[at].toTensor().defined())
            (*stack)[at] = at::autocast::cached_cast(dtype, (*stack)[at].toTensor(), SIM);
    op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    for (const char *name : {"conv1d", "conv2d", "conv3d", "bmm", "mm", "baddbmm", "addmm", "addbmm", "linear", "matmul",
                             "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
                             "scaled_dot_product_attention"})
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_in_lower_precision>());
}

/* ---- Registration ---- */

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        c10::DataPtr data = c10::GetAllocator(c10::DeviceType::CPU)->allocate(bytes);
        void *address = data.get();
        if (address == nullptr) return data;
        {
            std::lock_guard<std::mutex> guard(lock);
            pinned[address] = bytes;
        }
        auto *owner = new c10::DataPtr(std::move(data));
        return {address, owner, &unpin, Device(c10::DeviceType::CPU)};
    }
    static void unpin(void *context) {
        auto *owner = (c10::DataPtr *)context;
        {
            std::lock_guard<std::mutex> guard(lock);
            pinned.erase(owner->get());
        }
        delete owner;
    }
    static bool holds(const void *address) {
        std::lock_guard<std::mutex> guard(lock);
        auto after = pinned.upper_bound((void *)address);
        if (after == pinned.begin()) return false;
        --after;
        return (char *)address < (char *)after->first + after->second;
    }
    void copy_data(void *to, const void *from, size_t bytes) const override { memcpy(to, from, bytes); }
    static inline std::mutex lock;
    static inline std::map<void *, size_t> pinned;
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    void init() const override {}
    DeviceIndex deviceCount() const override { return DEVICES; }
    void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({SIM, device}); }
    DeviceIndex getCurrentDevice() const override { return current_device; }
    DeviceIndex exchangeDevice(DeviceIndex device) const override { return Guard().exchangeDevice({SIM, device}).index(); }
    DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
        return device < 0 ? current_device : exchangeDevice(device);
    }
    bool isPinnedPtr(const void *address) const override { return PinnedAllocator::holds(address); }
    c10::Allocator *getPinnedMemoryAllocator() const override {
        static PinnedAllocator &pinned = *new PinnedAllocator();
        return &pinned;
    }
    Device getDeviceFromPtr(void *address) const override {
        TORCH_CHECK(is_device_address(address), "sim: this is no address of a device");
        return {SIM, (DeviceIndex)(((char *)address - device_memory) / DEVICE_BYTES)};
    }
    const at::Generator &getDefaultGenerator(DeviceIndex) const override {
        return at::globalContext().defaultGenerator(Device(c10::DeviceType::CPU));
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        resize_storage(storage.unsafeGetStorageImpl(), bytes);
    }
};

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", local_scalar);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Storage", set_whole_storage);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("set_", set_nothing);
    m.impl("record_stream", record_stream);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>()); }

/* Has each op whose kernel on the CPU is no composition of others run that kernel: its bits are those of the CPU. */
void take_kernels_of_cpu() {
    static const std::set<std::string> own = {
        "aten::empty.memory_format", "aten::empty_strided", "aten::_local_scalar_dense",
        "aten::set_.source_Storage_storage_offset", "aten::set_.source_Storage", "aten::set_.source_Tensor", "aten::set_",
        "aten::record_stream",
    };
    auto *library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    auto names = c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CPU);
    for (const c10::OperatorName &name : names) {
        std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
        if (full.rfind("aten::", 0) == 0 && !own.count(full))
            library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
    }
    for (const char *name : {"convolution", "convolution_backward"})
        library->impl(name, torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}

} // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

/* ---- What Python calls ---- */

extern "C" {

void sim_setup() {
    open_memory();
    notice_faults();
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    take_kernels_of_cpu();
}
void sim_counts(long *found) {
    for (int at = 0; at < COUNTS; at++) found[at] = counts[at];
}
long sim_waits_of(long thread) {
    std::lock_guard<std::mutex> guard(waits_lock);
    auto found = waits_of_threads.find(thread);
    return found == waits_of_threads.end() ? 0 : found->second;
}
void sim_reset() {
    for (auto &count : counts) count = 0;
    std::lock_guard<std::mutex> guard(waits_lock);
    waits_of_threads.clear();
}
/* Returns how much of a device is allocated, or was at most since the last call with `again`. */
size_t sim_allocated(int device) { return allocated[device]; }
size_t sim_peak(int device, int again) {
    std::lock_guard<std::mutex> guard(state);
    size_t found = peak[device];
    if (again) peak[device] = allocated[device];
    return found;
}
void sim_set_capacity(int device, size_t bytes) { capacity[device] = bytes; }
size_t sim_capacity(int device) { return capacity[device]; }
int sim_device() { return current_device; }
uint64_t sim_stream(int device) { return (uint64_t)(device + 1) * 0x1000 + current_streams[device] * 0x10; }
/* Writes the next violation that was found, and forgets it. Returns 0 if there is none. */
int sim_next_violation(char *text, size_t bytes) {
    std::lock_guard<std::mutex> guard(state);
    if (long found = faults.exchange(0)) {
        mprotect(device_memory, DEVICES * DEVICE_BYTES, PROT_NONE);
        violations.push_back("the host touched " + std::to_string(found) + " pages of devices' memory");
    }
    if (violations.empty()) return 0;
    snprintf(text, bytes, "%s", violations.front().c_str());
    violations.erase(violations.begin());
    return 1;
}

/* What a driver calls around kernels and copies that are not those of torch. They use the addresses of devices, which are
   open meanwhile. */
static int open_count;
void sim_begin_work(uint64_t handle, int is_copy) {
    int device = (int)(handle >> 12) - 1, stream = device * STREAMS + (int)(handle & 0xFFF) / 0x10;
    counts[is_copy ? TO_DEVICE : LAUNCHES]++;
    begin_launch(stream);
    std::lock_guard<std::mutex> guard(state);
    if (open_count++ == 0)
        for (int at = 0; at < DEVICES; at++)
            mprotect(device_memory + at * DEVICE_BYTES, top[at], PROT_READ | PROT_WRITE);
}
void sim_end_work() {
    std::lock_guard<std::mutex> guard(state);
    if (--open_count == 0) mprotect(device_memory, DEVICES * DEVICE_BYTES, PROT_NONE);
}
}
