// A device that runs behind the host, for tests: torch's PrivateUse1 backend under the name "lag".
//
// Each stream is a worker thread that runs the CPU kernels of the ops. A launch returns at once. When a kernel ends is
// decided by a clock of the device's own (`run_until`): a launch moves it on by the host's time, each kernel takes a
// time that is drawn from the seed, a wait moves it to the end of what is waited for. So the same program sees the same
// schedule, whatever else the machine does. It guarantees:
// - device memory is mapped twice. Tensors hold the address of a mapping without any access rights, so that a read by
//   the host is a fault, which is counted. Workers use the other mapping;
// - the target of a non-blocking copy to pinned memory has no access rights until the host has seen an event that
//   comes after the copy, however fast the copy was made;
// - each launch is checked by vector clocks: an access that no event orders after an earlier one is counted as a race;
// - memory that was freed is reused by the next allocation on its stream, which fills it with NaN first;
// - results do not depend on delays, unless somebody forgot to wait.
//
// Counted: launches, copies in each direction, host waits, faults, races, bytes. A recorder lists all of it in order.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>

namespace {

constexpr auto kLag = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2, kStreams = 8;  // stream 0 of each device is its default one
constexpr int kAll = kDevices * kStreams;
constexpr double kHost = 4;       // microseconds that a launch takes the host
constexpr size_t kPending = 512;  // tasks that are left until somebody looks
constexpr size_t kArena = size_t(8) << 30, kAlign = 512, kPage = 4096;

using Clock = std::array<uint64_t, kAll>;  // of each stream, how many launches come before

void join(Clock& into, const Clock& other) {
  for (int i = 0; i < kAll; ++i) into[i] = std::max(into[i], other[i]);
}

struct Counts {
  uint64_t launches = 0, to_host = 0, to_device = 0, waits = 0, blocked = 0, fetched = 0, races = 0, errors = 0,
           segments = 0, events = 0;
};

// -- memory ---------------------------------------------------------------------------------------------------

struct Block {
  size_t offset, size;
  int stream = 0;                  // that it was allocated on
  std::array<uint64_t, kAll> used{};  // launches of other streams that must pass before it is free (record_stream)
  int write_stream = -1;
  uint64_t write = 0;
  Clock reads{};
  bool locked = false;  // pinned: no access until the host has seen `write`
};

struct Arena {
  char *guarded = nullptr, *open = nullptr;
  size_t top = 0;
  std::map<size_t, Block*> blocks;  // by offset
  std::map<std::pair<int, size_t>, std::vector<Block*>> free;  // by stream and size
  std::vector<Block*> deferred;
  size_t bytes = 0, peak = 0, reserved = 0;

  void map(int protection) {
    if (open) return;
    int file = memfd_create("lag", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArena) == 0, "no memory file");
    guarded = static_cast<char*>(mmap(nullptr, kArena, protection, MAP_SHARED | MAP_NORESERVE, file, 0));
    open = static_cast<char*>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    TORCH_CHECK(guarded != MAP_FAILED && open != MAP_FAILED, "no memory for a device");
    close(file);
  }
  bool holds(const void* address) const {
    auto at = static_cast<const char*>(address);
    return guarded && at >= guarded && at < guarded + kArena;
  }
  char* opened(const void* address) const { return open + (static_cast<const char*>(address) - guarded); }
  Block* find(const void* address) {
    auto it = blocks.upper_bound(static_cast<const char*>(address) - guarded);
    TORCH_CHECK(it != blocks.begin(), "an address that was never allocated");
    return std::prev(it)->second;
  }
};

// -- streams --------------------------------------------------------------------------------------------------

struct Task {
  std::function<void()> run;
  double end;      // of the device's clock, in microseconds
  uint64_t order;  // of all launches
};

struct StreamState {
  std::thread worker;
  std::deque<Task> tasks;  // launched and not run
  std::vector<Task> turn;  // for the worker, now
  uint64_t launched = 0, done = 0;
  double end = 0;  // of the last task
  Clock clock{};
};

struct Event {
  int stream = -1;
  uint64_t at = 0;
  Clock clock{};
};

struct Runtime {
  std::mutex mutex;
  std::condition_variable changed;
  Arena arenas[kDevices], pinned;
  StreamState streams[kAll];
  Clock host{};
  Counts counts;
  std::vector<Block*> locked;
  std::mt19937_64 chance{0};
  double mean = 0;       // microseconds that a kernel takes
  double now = 0;        // on the device's clock
  uint64_t order = 0;
  size_t pending = 0;    // tasks that were not run
  bool running = false;  // True while a worker has its turn
  bool held = false;     // True while the device stands still: only a wait moves it on
  bool capable = true;
  bool recording = false;
  std::vector<std::string> record;
  std::string error;
  int next_stream[kDevices] = {};
};

Runtime& rt() {
  static auto* runtime = new Runtime;  // never destroyed: workers outlive everything
  return *runtime;
}

std::atomic<uint64_t> faults{0};
thread_local int current_device = 0;
thread_local std::array<int, kDevices> current_stream{};
struct sigaction former;

int global(c10::DeviceIndex device, c10::StreamId id) { return device * kStreams + static_cast<int>(id); }
int global(const c10::Stream& stream) { return global(stream.device_index(), stream.id()); }
int here(int device) { return global(device, current_stream[device]); }

void on_fault(int number, siginfo_t* info, void* context) {
  auto& r = rt();
  for (Arena* arena : {&r.arenas[0], &r.arenas[1], &r.pinned}) {
    if (arena->holds(info->si_addr)) {
      ++faults;  // counted, and then let through
      auto page = reinterpret_cast<uintptr_t>(info->si_addr) & ~(kPage - 1);
      mprotect(reinterpret_cast<void*>(page), kPage, PROT_READ | PROT_WRITE);
      return;
    }
  }
  sigaction(SIGSEGV, &former, nullptr);
}

void work(int number) {
  auto& r = rt();
  auto& stream = r.streams[number];
  std::unique_lock<std::mutex> lock(r.mutex);
  for (;;) {
    r.changed.wait(lock, [&] { return !stream.turn.empty(); });
    std::vector<Task> turn;
    turn.swap(stream.turn);
    lock.unlock();
    std::string error;
    uint64_t errors = 0;
    for (auto& task : turn) {
      try {
        if (task.run) task.run();
      } catch (const std::exception& e) {
        error = e.what();
        ++errors;
      }
      task.run = nullptr;
    }
    lock.lock();
    if (errors) {
      r.counts.errors += errors;
      r.error = error;
    }
    stream.done += turn.size();
    r.running = false;
    r.changed.notify_all();
  }
}

// For the entry points: workers run while the host waits for them, and may need the interpreter.
struct NoInterpreter {
  PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~NoInterpreter() {
    if (state) PyEval_RestoreThread(state);
  }
};

// All of the following: with the lock held.

void note(std::string text) {
  if (rt().recording) rt().record.push_back(std::move(text));
}

struct Access {
  Block* block;
  bool writes;
};

bool covers(const Clock& clock, int stream, uint64_t launch) { return stream < 0 || clock[stream] >= launch; }

void check_access(const std::string& name, int number, const Clock& clock, uint64_t launch, const Access& access) {
  auto& r = rt();
  auto& block = *access.block;
  bool ordered = covers(clock, block.write_stream, block.write);
  if (access.writes)
    for (int i = 0; i < kAll; ++i) ordered &= i == number || clock[i] >= block.reads[i];
  if (!ordered) {
    ++r.counts.races;
    r.error = "race: " + name + " on stream " + std::to_string(number) + " after stream " +
        std::to_string(block.write_stream);
  }
  if (access.writes) {
    block.write_stream = number;
    block.write = launch;
    block.reads.fill(0);
  } else {
    block.reads[number] = launch;
  }
}

// When a launch of a stream ends on the device's clock.
double end_of(int number, uint64_t launch) {
  auto& stream = rt().streams[number];
  return launch <= stream.done ? 0 : stream.tasks[launch - stream.done - 1].end;
}

// Run everything that ends until then, in the order of ends. Kernels run one after another, so that what a mistake
// makes of the numbers is the same each time.
void run_until(std::unique_lock<std::mutex>& lock, double end) {
  auto& r = rt();
  r.changed.wait(lock, [&] { return !r.running; });
  for (;;) {
    StreamState* first = nullptr;
    auto before = [](const Task& one, const Task& other) {
      return std::tie(one.end, one.order) < std::tie(other.end, other.order);
    };
    double until = end;
    for (auto& stream : r.streams) {
      if (stream.tasks.empty()) continue;
      if (!first || before(stream.tasks.front(), first->tasks.front())) {
        if (first) until = std::min(until, first->tasks.front().end);
        first = &stream;
      } else {
        until = std::min(until, stream.tasks.front().end);
      }
    }
    if (!first || first->tasks.front().end > end) return;
    do {
      first->turn.push_back(std::move(first->tasks.front()));
      first->tasks.pop_front();
      --r.pending;
    } while (!first->tasks.empty() && first->tasks.front().end < until);
    // Its tasks are no longer in the queue, so nobody may ask for their ends before the turn is over.
    r.running = true;
    r.changed.notify_all();
    r.changed.wait(lock, [&] { return !r.running; });
  }
}

void catch_up(std::unique_lock<std::mutex>& lock) {
  run_until(lock, rt().held ? -1 : rt().now);
}

uint64_t launch(std::unique_lock<std::mutex>& lock, int number, const std::string& name,
                const std::vector<Access>& accesses, std::function<void()> run, int wait_stream = -1,
                uint64_t wait = 0) {
  auto& r = rt();
  r.changed.wait(lock, [&] { return !r.running; });
  auto& stream = r.streams[number];
  if (!stream.worker.joinable()) stream.worker = std::thread(work, number);
  uint64_t launch = ++stream.launched;
  join(stream.clock, r.host);
  stream.clock[number] = launch;
  for (auto& access : accesses) check_access(name, number, stream.clock, launch, access);
  double takes = 0;
  if (!r.held) r.now += kHost;
  if (r.mean > 0 && run) {
    double dice = std::uniform_real_distribution<double>()(r.chance);
    // Most kernels are quick; one in sixteen is late by far.
    takes = dice < 15.0 / 16 ? r.mean * dice / 8 : 16 * r.mean * (dice - 15.0 / 16) * 16;
  }
  double begin = std::max(r.now, stream.end);
  if (wait_stream >= 0) begin = std::max(begin, end_of(wait_stream, wait));
  stream.end = begin + takes;
  stream.tasks.push_back({std::move(run), stream.end, ++r.order});
  if (++r.pending > kPending) catch_up(lock);
  return launch;
}

void unlock_seen() {
  auto& r = rt();
  auto out = std::remove_if(r.locked.begin(), r.locked.end(), [&](Block* block) {
    if (!covers(r.host, block->write_stream, block->write)) return false;
    mprotect(r.pinned.guarded + block->offset, block->size, PROT_READ | PROT_WRITE);
    block->locked = false;
    return true;
  });
  r.locked.erase(out, r.locked.end());
}

void host_saw(const Clock& clock) {
  join(rt().host, clock);
  unlock_seen();
}

void wait_for(std::unique_lock<std::mutex>& lock, int number, uint64_t launch, const Clock& clock, const char* what) {
  auto& r = rt();
  ++r.counts.waits;
  note(std::string("wait ") + what);
  catch_up(lock);
  if (r.streams[number].done < launch) {
    ++r.counts.blocked;
    r.now = std::max(r.now, end_of(number, launch));
    run_until(lock, r.now);
  }
  host_saw(clock);
  if (!r.error.empty() && r.counts.errors) {
    std::string error = r.error;
    r.error.clear();
    r.counts.errors = 0;
    lock.unlock();
    TORCH_CHECK(false, "lag: a kernel failed: ", error);
  }
}

void wait_stream(std::unique_lock<std::mutex>& lock, int number, const char* what) {
  auto& stream = rt().streams[number];
  wait_for(lock, number, stream.launched, Clock(stream.clock), what);
}

// -- allocators -----------------------------------------------------------------------------------------------

Block* take_block(Arena& arena, int stream, size_t size) {
  auto& kept = arena.free[{stream, size}];
  if (!kept.empty()) {
    Block* block = kept.back();  // the last one freed: whoever still reads it gets caught
    kept.pop_back();
    return block;
  }
  TORCH_CHECK(arena.top + size <= kArena, "lag: out of memory");
  auto* block = new Block{arena.top, size, stream};
  arena.top += size;
  arena.reserved += size;
  arena.blocks[block->offset] = block;
  return block;
}

size_t rounded(size_t size, size_t unit) {
  size = (std::max<size_t>(size, 1) + unit - 1) / unit * unit;
  size_t step = unit;  // eight sizes for each power of two, so that blocks of nearly the same size are reused
  while (step * 16 < size) step *= 2;
  return (size + step - 1) / step * step;
}

void recall_deferred(std::unique_lock<std::mutex>& lock, Arena& arena) {
  auto& r = rt();
  if (!arena.deferred.empty()) catch_up(lock);
  auto out = std::remove_if(arena.deferred.begin(), arena.deferred.end(), [&](Block* block) {
    for (int i = 0; i < kAll; ++i)
      if (block->used[i] > r.streams[i].done) return false;
    // The allocator knows that these launches are over. Nobody else learns it from here.
    for (int i = 0; i < kAll; ++i) {
      if (block->reads[i] <= block->used[i]) block->reads[i] = 0;
      if (block->write_stream == i && block->write <= block->used[i]) block->write_stream = -1;
    }
    block->used.fill(0);
    arena.free[{block->stream, block->size}].push_back(block);
    return true;
  });
  arena.deferred.erase(out, arena.deferred.end());
}

void free_device(void* context) {
  auto& r = rt();
  auto* block = static_cast<Block*>(context);
  std::lock_guard<std::mutex> lock(r.mutex);
  Arena& arena = r.arenas[block->stream / kStreams];
  arena.bytes -= block->size;
  for (int i = 0; i < kAll; ++i)
    if (block->used[i]) {
      for (int k = 0; k < kAll; ++k)
        if (block->used[k]) block->used[k] = r.streams[k].launched;
      arena.deferred.push_back(block);
      return;
    }
  arena.free[{block->stream, block->size}].push_back(block);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    auto& r = rt();
    NoInterpreter released;
    std::unique_lock<std::mutex> lock(r.mutex);
    c10::Device device(kLag, current_device);
    if (!size) return {nullptr, nullptr, &none, device};
    Arena& arena = r.arenas[current_device];
    arena.map(PROT_NONE);
    recall_deferred(lock, arena);
    size_t before = arena.reserved;
    Block* block = take_block(arena, here(current_device), rounded(size, kAlign));
    if (arena.reserved != before) {
      ++r.counts.segments;
      note("segment");
    } else {
      char* at = arena.open + block->offset;
      size_t length = block->size;
      launch(lock, block->stream, "reuse", {{block, true}}, [=] { memset(at, 0xff, length); });
    }
    arena.bytes += block->size;
    arena.peak = std::max(arena.peak, arena.bytes);
    return {arena.guarded + block->offset, block, &free_device, device};
  }
  static void none(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "lag: copy_data"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    auto& r = rt();
    std::lock_guard<std::mutex> lock(r.mutex);
    auto* block = static_cast<Block*>(pointer.get_context());
    int number = global(stream);
    if (block && number != block->stream) block->used[number] = std::max<uint64_t>(1, r.streams[number].launched);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto& r = rt();
    std::lock_guard<std::mutex> lock(r.mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = r.arenas[device].bytes;
    stats.allocated_bytes[0].peak = r.arenas[device].peak;
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = r.arenas[device].reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    auto& r = rt();
    std::lock_guard<std::mutex> lock(r.mutex);
    r.arenas[device].peak = r.arenas[device].bytes;
  }
} device_allocator;

void free_pinned(void* context) {
  auto& r = rt();
  auto* block = static_cast<Block*>(context);
  std::lock_guard<std::mutex> lock(r.mutex);
  r.pinned.bytes -= block->size;
  r.pinned.deferred.push_back(block);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    auto& r = rt();
    NoInterpreter released;
    std::unique_lock<std::mutex> lock(r.mutex);
    Arena& arena = r.pinned;
    arena.map(PROT_READ | PROT_WRITE);
    recall_deferred(lock, arena);
    Block* block = take_block(arena, 0, rounded(size, kPage));
    if (block->locked) {  // nobody read what was copied there
      r.locked.erase(std::find(r.locked.begin(), r.locked.end(), block));
      mprotect(arena.guarded + block->offset, block->size, PROT_READ | PROT_WRITE);
      block->locked = false;
    }
    arena.bytes += block->size;
    arena.peak = std::max(arena.peak, arena.bytes);
    return {arena.guarded + block->offset, block, &free_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_allocator;

REGISTER_ALLOCATOR(kLag, &device_allocator)
REGISTER_HOST_ALLOCATOR(kLag, &pinned_allocator)

// -- what torch asks a device for -----------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kLag; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kLag, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) {
      TORCH_CHECK(device.index() < kDevices, "lag: there are ", kDevices, " devices");
      current_device = device.index();
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  static int index(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }
  c10::Stream made(int device, int id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kLag, static_cast<c10::DeviceIndex>(device)), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return made(index(device), current_stream[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return made(index(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto& r = rt();
    TORCH_CHECK(r.capable, "Backend doesn't support create a new Stream.");
    std::lock_guard<std::mutex> lock(r.mutex);
    int& next = r.next_stream[index(device)];
    next = next % (kStreams - 1) + 1;
    return made(index(device), next);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = static_cast<int>(stream.id());
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto& r = rt();
    TORCH_CHECK(r.capable, "Backend doesn't support events.");
    std::lock_guard<std::mutex> lock(r.mutex);
    if (!*event) *event = new Event;
    int number = global(stream);
    auto& state = r.streams[number];
    join(state.clock, r.host);
    *static_cast<Event*>(*event) = Event{number, state.launched, state.clock};
    ++r.counts.events;
    note("event " + std::to_string(number));
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto& r = rt();
    if (!event) return;
    NoInterpreter released;
    std::unique_lock<std::mutex> lock(r.mutex);
    auto& seen = *static_cast<Event*>(event);
    int number = global(stream);
    join(r.streams[number].clock, seen.clock);
    note("stream " + std::to_string(number) + " waits for " + std::to_string(seen.stream));
    if (seen.stream != number) launch(lock, number, "wait", {}, nullptr, seen.stream, seen.at);
  }
  bool queryEvent(void* event) const override {
    auto& r = rt();
    if (!event) return true;
    NoInterpreter released;
    std::unique_lock<std::mutex> lock(r.mutex);
    catch_up(lock);
    auto& seen = *static_cast<Event*>(event);
    if (r.streams[seen.stream].done < seen.at) return false;
    host_saw(seen.clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    auto& r = rt();
    if (!event) return;
    NoInterpreter released;
    std::unique_lock<std::mutex> lock(r.mutex);
    auto& seen = *static_cast<Event*>(event);
    wait_for(lock, seen.stream, seen.at, Clock(seen.clock), "event");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }
  bool queryStream(const c10::Stream& stream) const override {
    auto& r = rt();
    NoInterpreter released;
    std::unique_lock<std::mutex> lock(r.mutex);
    catch_up(lock);
    auto& state = r.streams[global(stream)];
    if (state.done < state.launched) return false;
    host_saw(Clock(state.clock));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    NoInterpreter released;
    std::unique_lock<std::mutex> lock(rt().mutex);
    wait_stream(lock, global(stream), "stream");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    NoInterpreter released;
    std::unique_lock<std::mutex> lock(rt().mutex);
    for (int i = 0; i < kStreams; ++i) {
      auto& state = rt().streams[global(device, i)];
      if (state.launched) wait_for(lock, global(device, i), state.launched, Clock(state.clock), "device");
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator.recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(kLag, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> made{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return made[index < 0 ? current_device : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current_device;
    current_device = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return rt().pinned.holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void* data) const override {
    return {kLag, static_cast<c10::DeviceIndex>(rt().arenas[1].holds(data))};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override;
};

// -- kernels --------------------------------------------------------------------------------------------------

bool is_lag(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kLag; }

Arena* arena_of(const void* data) {
  auto& r = rt();
  for (Arena* arena : {&r.arenas[0], &r.arenas[1], &r.pinned})
    if (arena->holds(data)) return arena;
  return nullptr;
}

// The same memory as a CPU tensor, by the mapping that workers use.
at::Tensor opened(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  void* data = tensor.numel() ? const_cast<void*>(tensor.unsafeGetTensorImpl()->data()) : nullptr;
  Arena* arena = data ? arena_of(data) : nullptr;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (!data) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  at::Tensor made = at::from_blob(arena ? arena->opened(data) : data, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

// With the lock held.
void add_access(std::vector<Access>& accesses, const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || !tensor.numel()) return;
  const void* data = tensor.unsafeGetTensorImpl()->data();
  if (Arena* arena = arena_of(data)) {
    Block* block = arena->find(data);
    for (auto& known : accesses)
      if (known.block == block) {
        known.writes |= writes;
        return;
      }
    accesses.push_back({block, writes});
  }
}

std::string described(const std::string& name, const std::vector<at::Tensor>& tensors) {
  if (!rt().recording) return name;
  std::string text = name;
  for (auto& tensor : tensors) {
    if (!tensor.defined() || !tensor.numel()) continue;
    auto* data = static_cast<const char*>(tensor.unsafeGetTensorImpl()->data());
    Arena* arena = arena_of(data);
    text += " " + std::to_string(arena ? data - arena->guarded : -1) + ":" + std::to_string(tensor.numel());
  }
  return text;
}

using Visit = std::function<at::Tensor(const at::Tensor&)>;

// A copy of a value with every tensor in it replaced.
c10::IValue replaced(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) return visit(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorList()) list.push_back(visit(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
      list.push_back(each.has_value() ? std::optional<at::Tensor>(visit(*each)) : std::nullopt);
    return list;
  }
  return value;
}

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  replaced(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

bool is_random(const c10::FunctionSchema& schema) {
  for (auto& argument : schema.arguments())
    if (argument.name() == "generator") return true;
  return false;
}

struct Call {
  const c10::OperatorHandle& op;
  std::vector<c10::IValue> args;
  c10::DeviceIndex device = -1;
  std::vector<Access> accesses;
  std::vector<at::Tensor> seen;

  Call(const c10::OperatorHandle& handle, torch::jit::Stack* stack) : op(handle) {
    auto& schema = op.schema();
    args = torch::jit::pop(*stack, schema.arguments().size());
    for (size_t i = 0; i < args.size(); ++i) {
      each_tensor(args[i], [&](const at::Tensor& tensor) {
        if (is_lag(tensor)) {
          TORCH_CHECK(device < 0 || device == tensor.device().index(), "lag: ", op.operator_name(),
                      " got tensors of two devices");
          device = tensor.device().index();
          seen.push_back(tensor);
        } else {
          TORCH_CHECK(!tensor.dim() || tensor.device().is_cpu() == false || op.schema().name() == "aten::index",
                      "lag: ", op.operator_name(), " got a tensor on ", tensor.device());
        }
      });
      if (args[i].isDevice() && args[i].toDevice().type() == kLag && device < 0)
        device = static_cast<c10::DeviceIndex>(Guard::index(args[i].toDevice()));
    }
    if (device < 0) device = static_cast<c10::DeviceIndex>(current_device);
  }

  bool writes(size_t i) const {
    auto* alias = op.schema().arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  // What the results will look like: the op on tensors that have no memory. Nothing where that needs the values.
  bool infer(std::vector<c10::IValue>& metas, std::vector<c10::IValue>& results) {
    metas.clear();
    for (auto& arg : args) {
      if (arg.isDevice()) {
        metas.emplace_back(c10::Device(c10::kMeta));
      } else if (arg.isGenerator()) {
        metas.emplace_back();
      } else {
        metas.push_back(replaced(arg, [](const at::Tensor& tensor) {
          if (!is_lag(tensor)) return tensor;
          return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
        }));
      }
    }
    torch::jit::Stack stack(metas);
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      op.callBoxed(stack);
    } catch (const std::exception&) {
      return false;
    }
    results = std::move(stack);
    return true;
  }

  // Arguments for a worker. Random numbers come from a seed that is drawn now, so that no delay changes them.
  std::vector<c10::IValue> opened_args() {
    auto& schema = op.schema();
    bool random = is_random(schema);
    std::vector<c10::IValue> found;
    for (size_t i = 0; i < args.size(); ++i) {
      if (args[i].isDevice()) {
        found.emplace_back(c10::Device(c10::kCPU));
      } else if (random && schema.arguments()[i].name() == "generator") {
        at::Generator generator = args[i].isNone() ? default_generator(device) : args[i].toGenerator();
        auto* source = static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
        uint64_t seed;
        {
          std::lock_guard<std::mutex> guard(source->mutex_);
          seed = source->random64();
        }
        found.emplace_back(at::detail::createCPUGenerator(seed));
      } else {
        bool writes = this->writes(i);
        found.push_back(replaced(args[i], [&](const at::Tensor& tensor) {
          if (!is_lag(tensor)) return tensor.defined() ? tensor.detach().clone() : tensor;
          std::lock_guard<std::mutex> lock(rt().mutex);
          add_access(accesses, tensor, writes);
          return opened(tensor);
        }));
      }
    }
    return found;
  }
};

bool same_alias(const c10::Argument& result, const c10::Argument& arg) {
  auto *one = result.alias_info(), *other = arg.alias_info();
  return one && other && one->beforeSets() == other->beforeSets();
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

at::Tensor empty_like_this(const at::Tensor& model, c10::DeviceIndex device) {
  return at::empty_strided(model.sizes(), model.strides(), model.options().device(c10::Device(kLag, device)));
}

void copy_result(const at::Tensor& target, const at::Tensor& result) {
  if (target.defined() && target.numel()) target.copy_(result);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  NoInterpreter released;
  Call call(op, stack);
  c10::DeviceGuard guard(c10::Device(kLag, call.device));
  auto& schema = op.schema();
  std::vector<c10::IValue> metas, inferred;
  bool ahead = call.infer(metas, inferred);
  int number = here(call.device);
  std::string name = schema.name();
  if (!ahead) {  // needs the values: wait for them
    std::unique_lock<std::mutex> lock(rt().mutex);
    ++rt().counts.fetched;
    wait_stream(lock, number, name.c_str());
  }
  // Arguments named out are resized to what the op makes.
  if (ahead)
    for (size_t i = 0; i < call.args.size(); ++i)
      if (call.writes(i) && call.args[i].isTensor() && is_lag(call.args[i].toTensor()) &&
          call.args[i].toTensor().sizes() != metas[i].toTensor().sizes())
        at::native::resize_output(call.args[i].toTensor(), metas[i].toTensor().sizes());
  std::vector<c10::IValue> args = call.opened_args();
  if (!ahead) {
    torch::jit::Stack results(args);
    run_on_cpu(op, results);
    inferred = results;
  }
  std::vector<c10::IValue> answers;
  std::vector<std::pair<size_t, std::vector<at::Tensor>>> targets;  // memory for each result that is new
  for (size_t i = 0; i < inferred.size(); ++i) {
    int own = -1;
    for (size_t k = 0; k < call.args.size(); ++k)
      if (call.writes(k) && same_alias(schema.returns()[i], schema.arguments()[k])) own = static_cast<int>(k);
    if (own >= 0) {
      answers.push_back(call.args[own]);
      continue;
    }
    std::vector<at::Tensor> made;
    answers.push_back(replaced(inferred[i], [&](const at::Tensor& model) {
      at::Tensor fresh = model.defined() ? empty_like_this(model, call.device) : model;
      {
        std::lock_guard<std::mutex> lock(rt().mutex);
        add_access(call.accesses, fresh, true);
      }
      call.seen.push_back(fresh);
      made.push_back(opened(fresh));
      return fresh;
    }));
    targets.emplace_back(i, std::move(made));
  }
  auto work = [op = c10::OperatorHandle(op), args = std::move(args), targets, ahead, inferred]() mutable {
    torch::jit::Stack results;
    if (ahead) {
      results = std::move(args);
      run_on_cpu(op, results);
    } else {
      results = std::move(inferred);
    }
    at::AutoDispatchBelowADInplaceOrView below;
    for (auto& [i, made] : targets) {
      size_t next = 0;
      replaced(results[i], [&, &made = made](const at::Tensor& result) {
        copy_result(made[next++], result);
        return result;
      });
    }
  };
  {
    std::unique_lock<std::mutex> lock(rt().mutex);
    ++rt().counts.launches;
    note(described(name, call.seen));
    launch(lock, number, name, call.accesses, std::move(work));
  }
  for (auto& answer : answers) stack->push_back(std::move(answer));
}

// -- copies ---------------------------------------------------------------------------------------------------

void block_on(std::unique_lock<std::mutex>& lock, int waiting, int other) {
  auto& r = rt();
  if (waiting == other) return;
  join(r.streams[waiting].clock, r.streams[other].clock);
  launch(lock, waiting, "wait", {}, nullptr, other, r.streams[other].launched);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (!self.numel()) return self;
  at::Tensor from = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  bool to_lag = is_lag(self), from_lag = is_lag(from);
  c10::DeviceIndex device = from_lag ? from.device().index() : self.device().index();
  c10::DeviceGuard guard(c10::Device(kLag, device));
  auto& r = rt();
  NoInterpreter released;
  std::unique_lock<std::mutex> lock(r.mutex);
  int number = here(device);
  int other = to_lag && from_lag ? here(self.device().index()) : number;
  block_on(lock, number, other);
  bool pinned_self = r.pinned.holds(self.unsafeGetTensorImpl()->data());
  bool pinned_from = r.pinned.holds(from.unsafeGetTensorImpl()->data());
  std::vector<Access> accesses;
  add_access(accesses, from, false);
  add_access(accesses, self, true);
  std::string name = to_lag ? (from_lag ? "copy" : "to_device") : "to_host";
  ++(to_lag ? (from_lag ? r.counts.launches : r.counts.to_device) : r.counts.to_host);
  note(described(name, {from, self}));
  lock.unlock();
  at::Tensor target = opened(self), origin = from;
  // What lies in pageable memory is staged at the launch.
  if (from_lag || pinned_from) origin = opened(from);
  else origin = from.detach().clone();
  lock.lock();
  uint64_t at = launch(lock, number, name, accesses, [target, origin]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    target.copy_(origin);
  });
  block_on(lock, other, number);
  if (!to_lag) {
    if (pinned_self && non_blocking) {
      Block* block = r.pinned.find(self.unsafeGetTensorImpl()->data());
      block->used[number] = at;
      if (!block->locked) {
        block->locked = true;
        r.locked.push_back(block);
        mprotect(r.pinned.guarded + block->offset, block->size, PROT_NONE);
      }
    } else {
      wait_for(lock, number, at, Clock(r.streams[number].clock), "copy to host");
    }
  } else if (!from_lag) {
    if (pinned_from) r.pinned.find(from.unsafeGetTensorImpl()->data())->used[number] = at;
    if (!non_blocking && from.dim()) wait_for(lock, number, at, Clock(r.streams[number].clock), "copy to device");
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::Tensor into = target;
  copy_(into, self, non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  at::Tensor host = at::empty(self.sizes(), self.options().device(at::kCPU));
  host.copy_(self);
  return host.item();
}

// -- factories and views --------------------------------------------------------------------------------------

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::Device(kLag, static_cast<c10::DeviceIndex>(device ? Guard::index(*device) : current_device)));
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::Device(kLag, static_cast<c10::DeviceIndex>(device ? Guard::index(*device) : current_device)));
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const {
  c10::DeviceGuard guard(storage.device());
  at::DataPtr fresh = device_allocator.allocate(size), old;
  size_t kept = std::min(size, storage.nbytes());
  auto* impl = storage.unsafeGetStorageImpl();
  if (kept && storage.data()) {
    auto& r = rt();
    std::unique_lock<std::mutex> lock(r.mutex);
    Arena& arena = r.arenas[storage.device().index()];
    char *to = arena.opened(fresh.get()), *from = arena.opened(storage.data());
    ++r.counts.launches;
    launch(lock, here(storage.device().index()), "resize",
           {{arena.find(storage.data()), false}, {arena.find(fresh.get()), true}}, [=] { memcpy(to, from, kept); });
  }
  old = impl->set_data_ptr(std::move(fresh));
  impl->set_nbytes(size);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = (impl->storage_offset() + impl->numel()) * self.itemsize();
  if (needed > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return self;
}

void record_stream(at::Tensor& self, at::Stream stream) {
  device_allocator.recordStream(self.storage().data_ptr(), stream);
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  double keep = 1 - p;
  at::Tensor mask = at::empty_like(input).bernoulli_(keep).to(at::kBool);
  return {input * mask * (keep == 0 ? 0. : 1 / keep), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("record_stream", &record_stream);
  m.impl("native_dropout", &native_dropout);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

py::dict counts() {
  auto& r = rt();
  std::lock_guard<std::mutex> lock(r.mutex);
  py::dict found;
  found["launches"] = r.counts.launches;
  found["to_host"] = r.counts.to_host;
  found["to_device"] = r.counts.to_device;
  found["waits"] = r.counts.waits;
  found["blocked"] = r.counts.blocked;
  found["fetched"] = r.counts.fetched;
  found["races"] = r.counts.races;
  found["segments"] = r.counts.segments;
  found["events"] = r.counts.events;
  found["faults"] = faults.load();
  found["errors"] = r.counts.errors;
  found["pinned"] = r.pinned.reserved;
  return found;
}

void reset(uint64_t seed, double mean) {
  auto& r = rt();
  std::lock_guard<std::mutex> lock(r.mutex);
  r.counts = Counts();
  r.error.clear();
  r.chance.seed(seed);
  r.mean = mean;
  faults = 0;
}

void hold(bool on) {
  auto& r = rt();
  std::lock_guard<std::mutex> lock(r.mutex);
  r.held = on;
}

void start() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  struct sigaction action {};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &former);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", &start);
  m.def("counts", &counts);
  m.def("reset", &reset);
  m.def("hold", &hold, py::call_guard<py::gil_scoped_release>());
  m.def("error", [] { return rt().error; });
  m.def("set_capable", [](bool capable) { rt().capable = capable; });
  m.def("record", [](bool on) {
    std::lock_guard<std::mutex> lock(rt().mutex);
    rt().recording = on;
    auto found = rt().record;
    rt().record.clear();
    return found;
  });
  m.def("bytes", [](int device) {
    std::lock_guard<std::mutex> lock(rt().mutex);
    auto& arena = rt().arenas[device];
    return std::make_tuple(arena.bytes, arena.peak, arena.reserved);
  });
  m.def("reset_peak", [](int device) { device_allocator.resetPeakStats(static_cast<c10::DeviceIndex>(device)); });
  m.def("generator", [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); });
  m.def("device", [] { return current_device; });
  m.def("set_device", [](int device) { Guard().setDevice(c10::Device(kLag, static_cast<c10::DeviceIndex>(device))); });
  m.def("read", [](const at::Tensor& tensor) {  // as code that is wrong would: the first byte, by its address
    return static_cast<int>(*static_cast<volatile char*>(const_cast<void*>(tensor.unsafeGetTensorImpl()->data())));
  });
}
