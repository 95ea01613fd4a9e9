//! Driver of NVIDIA GPUs: the few functions of `libcuda.so.1` that staging needs, loaded when they are first used.
//!
//! One program runs with and without a GPU. The crate cudarc is not used here: it panics where the library or a symbol is missing, and
//! its enum of result codes is undefined for codes of later drivers. Signatures and codes are those of
//! <https://docs.nvidia.com/cuda/cuda-driver-api/>.
#![expect(unsafe_code, reason = "calls of a C library")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

use crate::error::{Error, ErrorKind, Result};

/// Names of the library: that of its ABI first, which packages of drivers and container runtimes install.
const NAMES: &[&str] = &["libcuda.so.1", "libcuda.so"];
/// Oldest version of the driver's API that is supported: 11.2, of drivers since R460.
const VERSION_MIN: c_int = 11_020;

/// Result code; 0 is success.
type Code = c_int;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: Code = 2;
/// `CUDA_ERROR_INVALID_DEVICE`.
const INVALID_DEVICE: Code = 101;
/// `CUDA_ERROR_OPERATING_SYSTEM`: the system refused a call of the driver.
const OPERATING_SYSTEM: Code = 304;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: Code = 600;
/// `CU_MEMHOSTREGISTER_PORTABLE`: registered for all contexts of the process.
const REGISTER_PORTABLE: c_uint = 1;
/// `CU_STREAM_NON_BLOCKING`: does not wait for the legacy stream, on which the process may compute.
const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_BLOCKING_SYNC`: a thread that waits sleeps.
const EVENT_BLOCKING: c_uint = 1;

/// Handle of an object of the driver.
macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(transparent)]
        pub(super) struct $name(*mut c_void);

        // SAFETY: the driver's objects may be used from every thread; the handle itself is only an address.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    };
}

handle!(
    /// Context of a device.
    Context
);
handle!(
    /// Queue of copies and kernels.
    Stream
);
handle!(
    /// Point in a stream.
    Event
);
handle!(
    /// Loaded kernels.
    Module
);
handle!(
    /// One of them.
    Kernel
);

/// The functions, by the field that holds each.
macro_rules! symbols {
    ($($field:ident: $symbol:literal ($($arg:ty),*);)*) => {
        /// The driver's functions.
        struct Symbols {
            $($field: unsafe extern "C" fn($($arg),*) -> Code,)*
        }

        impl Symbols {
            fn load(library: &'static Library) -> Result<Self> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the type is that of the function in NVIDIA's documentation.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> Code>($symbol) };
                        *found.map_err(|source| too_old(lacking($symbol)).source(source))?
                    },)*
                })
            }
        }
    };
}

symbols! {
    init: b"cuInit\0" (c_uint);
    driver_version: b"cuDriverGetVersion\0" (*mut c_int);
    error_name: b"cuGetErrorName\0" (Code, *mut *const c_char);
    device_count: b"cuDeviceGetCount\0" (*mut c_int);
    device: b"cuDeviceGet\0" (*mut c_int, c_int);
    device_name: b"cuDeviceGetName\0" (*mut c_char, c_int, c_int);
    retain: b"cuDevicePrimaryCtxRetain\0" (*mut Context, c_int);
    release: b"cuDevicePrimaryCtxRelease_v2\0" (c_int);
    set_current: b"cuCtxSetCurrent\0" (Context);
    memory: b"cuMemGetInfo_v2\0" (*mut usize, *mut usize);
    allocate: b"cuMemAlloc_v2\0" (*mut u64, usize);
    free: b"cuMemFree_v2\0" (u64);
    register: b"cuMemHostRegister_v2\0" (*mut c_void, usize, c_uint);
    unregister: b"cuMemHostUnregister\0" (*mut c_void);
    copy_in: b"cuMemcpyHtoDAsync_v2\0" (u64, *const c_void, usize, Stream);
    copy_out: b"cuMemcpyDtoH_v2\0" (*mut c_void, u64, usize);
    create_stream: b"cuStreamCreate\0" (*mut Stream, c_uint);
    destroy_stream: b"cuStreamDestroy_v2\0" (Stream);
    settle: b"cuStreamSynchronize\0" (Stream);
    stream_waits: b"cuStreamWaitEvent\0" (Stream, Event, c_uint);
    create_event: b"cuEventCreate\0" (*mut Event, c_uint);
    destroy_event: b"cuEventDestroy_v2\0" (Event);
    record: b"cuEventRecord\0" (Event, Stream);
    query: b"cuEventQuery\0" (Event);
    wait: b"cuEventSynchronize\0" (Event);
    elapsed: b"cuEventElapsedTime\0" (*mut f32, Event, Event);
    load: b"cuModuleLoadData\0" (*mut Module, *const c_void);
    unload: b"cuModuleUnload\0" (Module);
    kernel: b"cuModuleGetFunction\0" (*mut Kernel, Module, *const c_char);
    clear: b"cuMemsetD32Async\0" (u64, c_uint, usize, Stream);
    launch: b"cuLaunchKernel\0" (
        Kernel, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream, *mut *mut c_void, *mut *mut c_void
    );
}

/// The loaded driver. Every function may be called from any thread.
pub(super) struct Driver(Symbols);

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

impl Driver {
    /// The driver, loaded and initialized at the first call. A failed attempt is made again at the next.
    ///
    /// # Errors
    /// Unsupported, if there is no driver, it is too old, or it finds no GPU that it can use.
    pub(super) fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        let driver = Self(Symbols::load(library()?)?);
        // SAFETY: it may be called at any time, by any thread.
        let begun = unsafe { (driver.0.init)(0) };
        driver.check_as(ErrorKind::Unsupported, "CUDA cannot be used", begun)?;
        let mut version = 0;
        // SAFETY: the address is that of an integer.
        driver.check("cannot ask for the version of the CUDA driver", unsafe {
            (driver.0.driver_version)(&raw mut version)
        })?;
        if version < VERSION_MIN {
            return Err(too_old(format!("{}.{}", version / 1000, version % 1000 / 10)));
        }
        Ok(DRIVER.get_or_init(|| driver))
    }

    /// Makes an error of a code other than success.
    fn check(&self, doing: &'static str, code: Code) -> Result<()> {
        self.check_as(if code == OUT_OF_MEMORY { ErrorKind::Exhausted } else { ErrorKind::Other }, doing, code)
    }

    /// Makes an error of this kind of a code other than success.
    fn check_as(&self, kind: ErrorKind, doing: &'static str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: the address is that of a pointer, which the driver sets to a constant, or to null for an unknown code.
        unsafe { (self.0.error_name)(code, &raw mut name) };
        let name = if name.is_null() {
            "unknown".into()
        } else {
            // SAFETY: the driver's names are constants that end with 0.
            unsafe { CStr::from_ptr(name) }.to_string_lossy()
        };
        Err(Error::new(kind, doing).got(format!("{name} ({code})")))
    }

    /// The driver's number and the name of the GPU `ordinal`.
    pub(super) fn find(&self, ordinal: u32) -> Result<(c_int, String)> {
        let mut device = 0;
        // SAFETY: the address is that of an integer.
        let code = unsafe { (self.0.device)(&raw mut device, c_int::try_from(ordinal).unwrap_or(c_int::MAX)) };
        if code == INVALID_DEVICE {
            let mut count = 0;
            // SAFETY: the address is that of an integer.
            self.check("cannot count the GPUs", unsafe { (self.0.device_count)(&raw mut count) })?;
            return Err(Error::not_found("no such GPU")
                .at(format!("cuda:{ordinal}"))
                .expected(format!("one of {count}, counted from 0")));
        }
        self.check("cannot find the GPU", code)?;
        let mut name = [0_u8; 128];
        // SAFETY: the driver writes at most that many bytes.
        let code = unsafe { (self.0.device_name)(name.as_mut_ptr().cast(), 128, device) };
        self.check("cannot ask for the name of the GPU", code)?;
        let name =
            CStr::from_bytes_until_nul(&name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Ok((device, name))
    }

    /// The context of a device that this process's libraries share, kept until [`Driver::release`].
    pub(super) fn retain(&self, device: c_int) -> Result<Context> {
        let mut context = Context(ptr::null_mut());
        // SAFETY: the address is that of a handle.
        self.check("cannot use the GPU", unsafe { (self.0.retain)(&raw mut context, device) })?;
        Ok(context)
    }

    pub(super) fn release(&self, device: c_int) {
        // SAFETY: the caller retained it, and uses nothing of it any more.
        unsafe { (self.0.release)(device) };
    }

    /// Makes `context` that of this thread's calls.
    pub(super) fn enter(&self, context: Context) -> Result<()> {
        // SAFETY: the context is retained.
        self.check("cannot use the GPU", unsafe { (self.0.set_current)(context) })
    }

    /// Free and all bytes of the GPU's memory.
    pub(super) fn memory(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the addresses are those of integers.
        let code = unsafe { (self.0.memory)(&raw mut free, &raw mut total) };
        self.check("cannot ask for the GPU's memory", code)?;
        Ok((free as u64, total as u64))
    }

    pub(super) fn allocate(&self, len: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: the address is that of an integer.
        self.check("cannot get memory of the GPU", unsafe { (self.0.allocate)(&raw mut address, len) })?;
        Ok(address)
    }

    /// # Safety
    /// `address` is of [`Driver::allocate`], and no copy to or from it is pending.
    pub(super) unsafe fn free(&self, address: u64) {
        // SAFETY: as the caller says.
        unsafe { (self.0.free)(address) };
    }

    /// Pins memory of this process, so that the GPU reads it by itself.
    ///
    /// # Safety
    /// The memory stays mapped until [`Driver::unregister`].
    pub(super) unsafe fn register(&self, memory: *mut u8, len: usize) -> Result<()> {
        // SAFETY: as the caller says.
        let code = unsafe { (self.0.register)(memory.cast(), len, REGISTER_PORTABLE) };
        let is_limit = code == OUT_OF_MEMORY || code == OPERATING_SYSTEM;
        let kind = if is_limit { ErrorKind::Exhausted } else { ErrorKind::Other };
        self.check_as(kind, "cannot pin host memory", code).map_err(|error| {
            let error = error.expected(format!("{len} bytes"));
            if is_limit {
                error.help("raise the limit of locked memory (ulimit -l) of the process or its container")
            } else {
                error
            }
        })
    }

    /// # Safety
    /// `memory` is of [`Driver::register`], and no copy to or from it is pending.
    pub(super) unsafe fn unregister(&self, memory: *mut u8) {
        // SAFETY: as the caller says.
        unsafe { (self.0.unregister)(memory.cast()) };
    }

    /// Queues a copy to the GPU.
    ///
    /// # Safety
    /// `from` stays as it is, and `to` stays memory of the GPU, until an event that is recorded later has happened.
    pub(super) unsafe fn copy_in(&self, to: u64, from: &[u8], stream: Stream) -> Result<()> {
        // SAFETY: as the caller says.
        let code = unsafe { (self.0.copy_in)(to, from.as_ptr().cast(), from.len(), stream) };
        self.check("cannot copy to the GPU", code)
    }

    /// Copies from the GPU, and waits for it.
    ///
    /// # Safety
    /// `from` is that much memory of the GPU.
    pub(super) unsafe fn copy_out(&self, to: &mut [u8], from: u64) -> Result<()> {
        // SAFETY: as the caller says; the driver writes that many bytes.
        let code = unsafe { (self.0.copy_out)(to.as_mut_ptr().cast(), from, to.len()) };
        self.check("cannot copy from the GPU", code)
    }

    pub(super) fn create_stream(&self) -> Result<Stream> {
        let mut stream = Stream(ptr::null_mut());
        // SAFETY: the address is that of a handle.
        let code = unsafe { (self.0.create_stream)(&raw mut stream, STREAM_NON_BLOCKING) };
        self.check("cannot create a stream of the GPU", code)?;
        Ok(stream)
    }

    /// Ends a stream; the driver frees it once what is queued there is done.
    pub(super) fn destroy_stream(&self, stream: Stream) {
        // SAFETY: the caller has it from `create_stream`, and destroys it once.
        unsafe { (self.0.destroy_stream)(stream) };
    }

    /// Waits until all that is queued in `stream` is done.
    pub(super) fn settle(&self, stream: Stream) -> Result<()> {
        // SAFETY: it exists.
        self.check("GPU does not end its copies", unsafe { (self.0.settle)(stream) })
    }

    /// Lets `stream` wait for `event`.
    pub(super) fn wait_in_stream(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: both exist.
        self.check("cannot wait for a stream of the GPU", unsafe { (self.0.stream_waits)(stream, event, 0) })
    }

    pub(super) fn create_event(&self) -> Result<Event> {
        let mut event = Event(ptr::null_mut());
        // SAFETY: the address is that of a handle.
        let code = unsafe { (self.0.create_event)(&raw mut event, EVENT_BLOCKING) };
        self.check("cannot create an event of the GPU", code)?;
        Ok(event)
    }

    pub(super) fn destroy_event(&self, event: Event) {
        // SAFETY: the caller has it from `create_event`, and destroys it once.
        unsafe { (self.0.destroy_event)(event) };
    }

    /// Lets `event` happen once all that is queued in `stream` is done.
    pub(super) fn record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: both exist.
        self.check("cannot record an event of the GPU", unsafe { (self.0.record)(event, stream) })
    }

    /// True if `event` has happened, or will not because of an error, which [`Driver::wait`] reports.
    pub(super) fn has_happened(&self, event: Event) -> bool {
        // SAFETY: it exists.
        let code = unsafe { (self.0.query)(event) };
        code != NOT_READY
    }

    /// Waits until `event` has happened. Errors of earlier copies are reported here.
    pub(super) fn wait(&self, event: Event) -> Result<()> {
        // SAFETY: it exists.
        self.check("copy to the GPU failed", unsafe { (self.0.wait)(event) })
    }

    /// Milliseconds between two events that have happened.
    pub(super) fn elapsed(&self, from: Event, to: Event) -> Result<f32> {
        let mut elapsed = 0.0;
        // SAFETY: the address is that of a number; both events exist.
        let code = unsafe { (self.0.elapsed)(&raw mut elapsed, from, to) };
        self.check("cannot measure a copy to the GPU", code)?;
        Ok(elapsed)
    }
}

/// Shape of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    /// Blocks, in both dimensions.
    pub(super) blocks: (u32, u32),
    /// Threads of a block.
    pub(super) threads: u32,
}

impl Driver {
    /// Loads kernels, which the driver translates for its GPU.
    ///
    /// # Errors
    /// Unsupported, if the driver or the GPU is too old for them.
    pub(super) fn load(&self, text: &CStr) -> Result<Module> {
        let mut module = Module(ptr::null_mut());
        // SAFETY: the text ends with 0.
        let code = unsafe { (self.0.load)(&raw mut module, text.as_ptr().cast()) };
        self.check_as(ErrorKind::Unsupported, "cannot load the kernels", code)?;
        Ok(module)
    }

    pub(super) fn unload(&self, module: Module) {
        // SAFETY: the caller has it from `load`, and no kernel of it runs.
        unsafe { (self.0.unload)(module) };
    }

    pub(super) fn kernel(&self, module: Module, name: &CStr) -> Result<Kernel> {
        let mut kernel = Kernel(ptr::null_mut());
        // SAFETY: the module is loaded; the name ends with 0.
        let code = unsafe { (self.0.kernel)(&raw mut kernel, module, name.as_ptr()) };
        self.check("cannot find a kernel", code)?;
        Ok(kernel)
    }

    /// Queues a launch with these arguments, each of 8 bytes.
    ///
    /// # Safety
    /// The kernel takes these arguments, and what it reads and writes is allocated until an event that is recorded later has happened.
    pub(super) unsafe fn launch<const N: usize>(
        &self,
        kernel: Kernel,
        grid: Grid,
        mut arguments: [u64; N],
        stream: Stream,
    ) -> Result<()> {
        let mut addresses = arguments.each_mut().map(|argument| ptr::from_mut(argument).cast());
        let (Grid { blocks: (x, y), threads }, shared, extra) = (grid, 0, ptr::null_mut());
        // SAFETY: as the caller says; the driver copies the arguments.
        let code =
            unsafe { (self.0.launch)(kernel, x, y, 1, threads, 1, 1, shared, stream, addresses.as_mut_ptr(), extra) };
        self.check("cannot launch a kernel", code)
    }

    /// Queues the setting of `words` words of 4 bytes to 0.
    ///
    /// # Safety
    /// They are memory of the GPU that stays allocated until an event that is recorded later has happened.
    pub(super) unsafe fn clear(&self, address: u64, words: usize, stream: Stream) -> Result<()> {
        // SAFETY: as the caller says.
        self.check("cannot clear memory of the GPU", unsafe { (self.0.clear)(address, 0, words, stream) })
    }
}

/// A stream of another library of this process.
///
/// # Safety
/// `handle` is a `CUstream` that exists while the result is used; 0 is the legacy default stream.
pub(super) const unsafe fn foreign_stream(handle: usize) -> Stream {
    Stream(handle as *mut c_void)
}

/// The library, which stays loaded.
fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    let mut last = None;
    for name in NAMES {
        // SAFETY: the driver's library may be loaded by any thread; whoever can set its search path can replace this program, too.
        match unsafe { Library::new(*name) } {
            Ok(library) => return Ok(LIBRARY.get_or_init(|| library)),
            Err(error) => last = last.or(Some(error)),
        }
    }
    let error = Error::new(ErrorKind::Unsupported, "no CUDA driver on this machine")
        .expected(NAMES.join(" or "))
        .help("install NVIDIA's driver; in a container, run it with the NVIDIA container toolkit");
    Err(match last {
        Some(source) => error.source(source),
        None => error,
    })
}

fn too_old(got: String) -> Error {
    Error::new(ErrorKind::Unsupported, "CUDA driver is too old")
        .expected(format!("version {}.{} of its API, or newer", VERSION_MIN / 1000, VERSION_MIN % 1000 / 10))
        .got(got)
        .help("install a newer driver of NVIDIA")
}

/// Words for a symbol that the library does not have.
fn lacking(symbol: &[u8]) -> String {
    format!("one without {}", String::from_utf8_lossy(symbol.strip_suffix(b"\0").unwrap_or(symbol)))
}
