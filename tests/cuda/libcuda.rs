//! A CUDA driver in software, for tests of what calls one: `libcuda.so.1` with the functions that towline uses.
//!
//! Copies run on a thread of their own, late, and only there is the memory touched, as by a real copy engine. What a real driver would not
//! forgive ends the process: a copy from memory that is not pinned, or to memory that is not allocated, and the end of memory with copies
//! or kernels pending. Kernels are interpreted (ptx.rs), and end the process if they read or write memory that is not allocated. Knobs
//! (environment):
//!
//! ```text
//! SOFT_CUDA_DEVICES=N           GPUs [1]
//! SOFT_CUDA_VERSION=N           version of the API [12040]
//! SOFT_CUDA_MEMORY=BYTES        memory of a GPU [1 GiB]
//! SOFT_CUDA_PINNED=BYTES        memory that may be pinned [1 GiB]
//! SOFT_CUDA_DELAY_US=N          time of a copy in microseconds [100]
//! SOFT_CUDA_FAIL=FUNCTION:CALL:CODE,...   result of the CALL-th call of FUNCTION (from 1), and of all later ones with `CALL+`
//! SOFT_CUDA_CORRUPT=CALL        changes a byte of the CALL-th copy
//! SOFT_CUDA_KERNELS=0           loads no kernels, as a driver that is too old for them [1]
//! SOFT_CUDA_COPYING=FILE        a file that is made when a copy starts
//! SOFT_CUDA_LOG=FILE            counts, written when the context is released
//! ```
#![allow(non_snake_case, clippy::missing_safety_doc, missing_docs)]

mod ptx;

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Condvar, LazyLock, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;
const INVALID_DEVICE: c_int = 101;
/// `CUDA_ERROR_UNSUPPORTED_PTX_VERSION`.
const UNSUPPORTED_PTX_VERSION: c_int = 222;
const NOT_FOUND: c_int = 500;
const NOT_READY: c_int = 600;

fn knob(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

fn die(what: &str) -> ! {
    eprintln!("software CUDA: {what}");
    std::process::abort();
}

#[derive(Default)]
struct State {
    /// Memory of the GPU, by address.
    allocated: BTreeMap<u64, Vec<u8>>,
    /// Pinned memory: lengths by address.
    pinned: BTreeMap<usize, usize>,
    /// Copies that have not ended: host address, device address, length.
    pending: Vec<(usize, u64, usize)>,
    calls: HashMap<&'static str, u64>,
    events: HashMap<usize, Arc<Moment>>,
    streams: HashMap<usize, mpsc::Sender<Task>>,
    modules: HashMap<usize, Arc<ptx::Module>>,
    /// Kernels by their handle: their module, and their name.
    kernels: HashMap<usize, (usize, String)>,
    /// Launches that have not ended.
    running: usize,
    handles: usize,
    contexts: u64,
    launches: u64,
    copies: u64,
    copied: u64,
    pinned_most: usize,
    pending_most: usize,
}

/// When an event happened; none until then.
#[derive(Default)]
struct Moment {
    at: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Moment {
    fn happen(&self) {
        *self.at.lock().unwrap() = Some(Instant::now());
        self.changed.notify_all();
    }

    fn wait(&self) -> Instant {
        let mut at = self.at.lock().unwrap();
        loop {
            match *at {
                Some(at) => return at,
                None => at = self.changed.wait(at).unwrap(),
            }
        }
    }
}

enum Task {
    Copy { from: usize, to: u64, len: usize, number: u64 },
    Clear { at: u64, words: usize },
    Launch { module: Arc<ptx::Module>, kernel: String, grid: ptx::Grid, arguments: Vec<u64> },
    Record(Arc<Moment>),
    Wait(Arc<Moment>),
}

/// Memory of the GPU, as kernels see it.
struct Allocated<'s>(&'s mut BTreeMap<u64, Vec<u8>>);

impl Allocated<'_> {
    fn get(&mut self, address: u64, len: usize) -> Option<&mut [u8]> {
        let (start, memory) = self.0.range_mut(..=address).next_back()?;
        let offset = usize::try_from(address - start).ok()?;
        memory.get_mut(offset..offset.checked_add(len)?)
    }
}

impl ptx::Memory for Allocated<'_> {
    fn bytes(&mut self, address: u64, len: usize) -> &mut [u8] {
        self.get(address, len).unwrap_or_else(|| die("a kernel uses memory that is not allocated"))
    }
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

/// Counts a call; the code that it is to return, if it is to fail.
fn call(function: &'static str) -> Option<c_int> {
    let mut state = STATE.lock().unwrap();
    let calls = state.calls.entry(function).or_insert(0);
    *calls += 1;
    let wanted = std::env::var("SOFT_CUDA_FAIL").ok()?;
    wanted.split(',').find_map(|fault| {
        let mut parts = fault.split(':');
        let (name, at, code) = (parts.next()?, parts.next()?, parts.next()?);
        let hit = match at.strip_suffix('+') {
            Some(first) => *calls >= first.parse().unwrap(),
            None => *calls == at.parse().unwrap(),
        };
        (name == function && hit).then(|| code.parse().unwrap())
    })
}

macro_rules! fails {
    ($function:literal) => {
        if let Some(code) = call($function) {
            return code;
        }
    };
}

/// True if `len` bytes at `start` are within one of `ranges`.
fn is_within(mut ranges: impl Iterator<Item = (u64, u64)>, start: u64, len: u64) -> bool {
    ranges.any(|(first, size)| first <= start && start + len <= first + size)
}

fn run(tasks: mpsc::Receiver<Task>) {
    let delay = Duration::from_micros(knob("SOFT_CUDA_DELAY_US", 100));
    let corrupt = knob("SOFT_CUDA_CORRUPT", 0);
    for task in tasks {
        match task {
            Task::Record(moment) => moment.happen(),
            Task::Wait(moment) => drop(moment.wait()),
            Task::Clear { at, words } => {
                let mut state = STATE.lock().unwrap();
                let mut memory = Allocated(&mut state.allocated);
                memory.get(at, 4 * words).unwrap_or_else(|| die("memory was freed before it was cleared")).fill(0);
            }
            Task::Launch { module, kernel, grid, arguments } => {
                thread::sleep(delay);
                for y in 0..grid.blocks[1] {
                    for x in 0..grid.blocks[0] {
                        let mut state = STATE.lock().unwrap();
                        module.kernels[&kernel].run_block(grid, [x, y], &arguments, &mut Allocated(&mut state.allocated));
                    }
                }
                STATE.lock().unwrap().running -= 1;
            }
            Task::Copy { from, to, len, number } => {
                thread::sleep(delay);
                let mut state = STATE.lock().unwrap();
                let pinned = state.pinned.iter().map(|(&start, &len)| (start as u64, len as u64));
                if !is_within(pinned, from as u64, len as u64) {
                    die("memory was unpinned during a copy");
                }
                let mut memory = Allocated(&mut state.allocated);
                let target = memory.get(to, len).unwrap_or_else(|| die("memory was freed during a copy"));
                target.copy_from_slice(unsafe { std::slice::from_raw_parts(from as *const u8, len) });
                if number == corrupt {
                    target[0] ^= 1;
                }
                let at = state.pending.iter().position(|&pending| pending == (from, to, len)).unwrap();
                state.pending.remove(at);
                state.copied += len as u64;
            }
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> c_int {
    fails!("cuInit");
    if knob("SOFT_CUDA_DEVICES", 1) == 0 { NO_DEVICE } else { SUCCESS }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    unsafe { *version = c_int::try_from(knob("SOFT_CUDA_VERSION", 12040)).unwrap() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: c_int, name: *mut *const c_char) -> c_int {
    let found = match code {
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        214 => c"CUDA_ERROR_ECC_UNCORRECTABLE",
        UNSUPPORTED_PTX_VERSION => c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
        _ => return INVALID_VALUE,
    };
    unsafe { *name = found.as_ptr() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    unsafe { *count = c_int::try_from(knob("SOFT_CUDA_DEVICES", 1)).unwrap() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    if i64::from(ordinal) >= i64::try_from(knob("SOFT_CUDA_DEVICES", 1)).unwrap() {
        return INVALID_DEVICE;
    }
    unsafe { *device = ordinal };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, _device: c_int) -> c_int {
    let text = c"Software GPU".to_bytes_with_nul();
    assert!(text.len() <= usize::try_from(len).unwrap());
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), text.len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, _device: c_int) -> c_int {
    fails!("cuDevicePrimaryCtxRetain");
    STATE.lock().unwrap().contexts += 1;
    unsafe { *context = 0xc0de as *mut c_void };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    let mut state = STATE.lock().unwrap();
    state.contexts -= 1;
    if let Ok(file) = std::env::var("SOFT_CUDA_LOG") {
        let State { allocated, pinned, pending, events, streams, copies, copied, .. } = &*state;
        let State { modules, running, launches, pinned_most, pending_most, .. } = &*state;
        let modules = modules.len();
        let (allocated, pinned, pending) = (allocated.len(), pinned.len(), pending.len());
        let (events, streams) = (events.len(), streams.len());
        let log = format!(
            r#"{{"allocated":{allocated},"pinned":{pinned},"pending":{pending},"events":{events},"streams":{streams},"modules":{modules},"running":{running},"launches":{launches},"copies":{copies},"copied":{copied},"pinned_most":{pinned_most},"pending_most":{pending_most}}}"#
        );
        std::fs::write(file, log).unwrap();
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> c_int {
    if context as usize != 0xc0de || STATE.lock().unwrap().contexts == 0 {
        die("a context that nobody retains");
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    let all = knob("SOFT_CUDA_MEMORY", 1 << 30) as usize;
    let used: usize = STATE.lock().unwrap().allocated.values().map(Vec::len).sum();
    unsafe { (*free, *total) = (all.saturating_sub(used), all) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, len: usize) -> c_int {
    fails!("cuMemAlloc_v2");
    let mut state = STATE.lock().unwrap();
    let used: usize = state.allocated.values().map(Vec::len).sum();
    if (used + len) as u64 > knob("SOFT_CUDA_MEMORY", 1 << 30) {
        return OUT_OF_MEMORY;
    }
    // No host address, so that nobody reads the memory by mistake.
    let after = state.allocated.last_key_value().map_or(0x7000_0000_0000, |(start, memory)| start + memory.len() as u64);
    let start = after.next_multiple_of(512);
    state.allocated.insert(start, vec![0xa5; len]);
    unsafe { *address = start };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    let mut state = STATE.lock().unwrap();
    let Some(memory) = state.allocated.remove(&address) else { die("memory is freed that is not allocated") };
    if state.pending.iter().any(|&(_, to, _)| address <= to && to < address + memory.len() as u64) {
        die("memory is freed to which a copy is pending");
    }
    if state.running > 0 {
        die("memory is freed while kernels run");
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, text: *const c_void) -> c_int {
    fails!("cuModuleLoadData");
    if knob("SOFT_CUDA_KERNELS", 1) == 0 {
        return UNSUPPORTED_PTX_VERSION;
    }
    let text = unsafe { CStr::from_ptr(text.cast()) }.to_str().unwrap();
    let parsed = ptx::Module::parse(text).unwrap_or_else(|error| die(&error));
    let mut state = STATE.lock().unwrap();
    state.handles += 16;
    let handle = state.handles;
    state.modules.insert(handle, Arc::new(parsed));
    unsafe { *module = handle as *mut c_void };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: *mut c_void) -> c_int {
    let mut state = STATE.lock().unwrap();
    if state.modules.remove(&(module as usize)).is_none() {
        die("kernels are unloaded that are not loaded");
    }
    if state.running > 0 {
        die("kernels are unloaded while some run");
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(kernel: *mut *mut c_void, module: *mut c_void, name: *const c_char) -> c_int {
    fails!("cuModuleGetFunction");
    let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap();
    let mut state = STATE.lock().unwrap();
    if !state.modules[&(module as usize)].kernels.contains_key(name) {
        return NOT_FOUND;
    }
    state.handles += 16;
    let handle = state.handles;
    state.kernels.insert(handle, (module as usize, name.to_owned()));
    unsafe { *kernel = handle as *mut c_void };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    kernel: *mut c_void,
    blocks_x: c_uint,
    blocks_y: c_uint,
    _blocks_z: c_uint,
    threads: c_uint,
    _threads_y: c_uint,
    _threads_z: c_uint,
    _shared: c_uint,
    stream: *mut c_void,
    arguments: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    fails!("cuLaunchKernel");
    let mut state = STATE.lock().unwrap();
    let (module, kernel) = state.kernels[&(kernel as usize)].clone();
    let module = Arc::clone(&state.modules[&module]);
    let count = module.kernels[&kernel].parameters.len();
    let arguments = (0..count).map(|number| unsafe { *(*arguments.add(number)).cast::<u64>() }).collect();
    if blocks_x == 0 || blocks_y == 0 || threads == 0 {
        return INVALID_VALUE;
    }
    let grid = ptx::Grid { blocks: [blocks_x, blocks_y], threads };
    state.launches += 1;
    state.running += 1;
    state.streams[&(stream as usize)].send(Task::Launch { module, kernel, grid, arguments }).unwrap();
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(at: u64, value: c_uint, words: usize, stream: *mut c_void) -> c_int {
    fails!("cuMemsetD32Async");
    assert_eq!(value, 0);
    STATE.lock().unwrap().streams[&(stream as usize)].send(Task::Clear { at, words }).unwrap();
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(memory: *mut c_void, len: usize, _flags: c_uint) -> c_int {
    fails!("cuMemHostRegister_v2");
    let mut state = STATE.lock().unwrap();
    let used: usize = state.pinned.values().sum();
    if (used + len) as u64 > knob("SOFT_CUDA_PINNED", 1 << 30) {
        return OUT_OF_MEMORY;
    }
    state.pinned.insert(memory as usize, len);
    state.pinned_most = state.pinned_most.max(used + len);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(memory: *mut c_void) -> c_int {
    let mut state = STATE.lock().unwrap();
    let start = memory as usize;
    let Some(len) = state.pinned.remove(&start) else { die("memory is unpinned that is not pinned") };
    if state.pending.iter().any(|&(from, ..)| start <= from && from < start + len) {
        die("memory is unpinned from which a copy is pending");
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, len: usize, stream: *mut c_void) -> c_int {
    fails!("cuMemcpyHtoDAsync_v2");
    let mut state = STATE.lock().unwrap();
    let from = from as usize;
    let pinned = state.pinned.iter().map(|(&start, &len)| (start as u64, len as u64));
    if !is_within(pinned, from as u64, len as u64) {
        die("a copy from memory that is not pinned");
    }
    if !is_within(state.allocated.iter().map(|(&start, memory)| (start, memory.len() as u64)), to, len as u64) {
        die("a copy to memory that is not allocated");
    }
    state.copies += 1;
    if let Ok(file) = std::env::var("SOFT_CUDA_COPYING") {
        std::fs::write(file, "").unwrap();
    }
    state.pending.push((from, to, len));
    state.pending_most = state.pending_most.max(state.pending.len());
    let task = Task::Copy { from, to, len, number: state.copies };
    state.streams[&(stream as usize)].send(task).unwrap();
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, len: usize) -> c_int {
    fails!("cuMemcpyDtoH_v2");
    let state = STATE.lock().unwrap();
    let Some((start, memory)) = state.allocated.range(..=from).next_back() else { return INVALID_VALUE };
    let offset = usize::try_from(from - start).unwrap();
    let Some(bytes) = memory.get(offset..offset + len) else { return INVALID_VALUE };
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), len) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut *mut c_void, _flags: c_uint) -> c_int {
    fails!("cuStreamCreate");
    let (tasks, received) = mpsc::channel();
    thread::spawn(|| run(received));
    let mut state = STATE.lock().unwrap();
    state.handles += 16;
    let handle = state.handles;
    state.streams.insert(handle, tasks);
    unsafe { *stream = handle as *mut c_void };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> c_int {
    if STATE.lock().unwrap().streams.remove(&(stream as usize)).is_none() {
        die("a stream is destroyed that does not exist");
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> c_int {
    fails!("cuStreamSynchronize");
    let moment = Arc::new(Moment::default());
    let Some(tasks) = STATE.lock().unwrap().streams.get(&(stream as usize)).cloned() else { die("no such stream") };
    tasks.send(Task::Record(Arc::clone(&moment))).unwrap();
    moment.wait();
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _flags: c_uint) -> c_int {
    fails!("cuStreamWaitEvent");
    let state = STATE.lock().unwrap();
    let moment = Arc::clone(&state.events[&(event as usize)]);
    state.streams[&(stream as usize)].send(Task::Wait(moment)).unwrap();
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut *mut c_void, _flags: c_uint) -> c_int {
    fails!("cuEventCreate");
    let mut state = STATE.lock().unwrap();
    state.handles += 16;
    let handle = state.handles;
    state.events.insert(handle, Arc::default());
    unsafe { *event = handle as *mut c_void };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> c_int {
    if STATE.lock().unwrap().events.remove(&(event as usize)).is_none() {
        die("an event is destroyed that does not exist");
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> c_int {
    fails!("cuEventRecord");
    let moment = Arc::new(Moment::default());
    let mut state = STATE.lock().unwrap();
    if state.events.insert(event as usize, Arc::clone(&moment)).is_none() {
        die("an event is recorded that does not exist");
    }
    // The legacy default stream has nothing to do here.
    match state.streams.get(&(stream as usize)) {
        Some(tasks) => tasks.send(Task::Record(moment)).unwrap(),
        None if stream.is_null() => moment.happen(),
        None => die("no such stream"),
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: *mut c_void) -> c_int {
    let moment = Arc::clone(&STATE.lock().unwrap().events[&(event as usize)]);
    let at = moment.at.lock().unwrap();
    if at.is_some() { SUCCESS } else { NOT_READY }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: *mut c_void) -> c_int {
    fails!("cuEventSynchronize");
    let moment = Arc::clone(&STATE.lock().unwrap().events[&(event as usize)]);
    moment.wait();
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, from: *mut c_void, to: *mut c_void) -> c_int {
    let moment = |event: *mut c_void| Arc::clone(&STATE.lock().unwrap().events[&(event as usize)]);
    let (from, to) = (moment(from).wait(), moment(to).wait());
    unsafe { *milliseconds = to.saturating_duration_since(from).as_secs_f32() * 1000.0 };
    SUCCESS
}
