//! Loading to a GPU, with the real binary and a CUDA driver in software (tests/cuda/libcuda.rs), which ends the process at what a real
//! driver would not forgive.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::cli::{User, has_members};
use crate::data::safetensors;
use crate::stores::missing;

/// Folder with the driver, which is built once for all tests.
fn driver() -> &'static Path {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    DRIVER.get_or_init(|| {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda");
        let source = sources.join("libcuda.rs");
        let mut version = blake3::Hasher::new();
        for file in [&source, &sources.join("ptx.rs")] {
            version.update(&std::fs::read(file).unwrap());
        }
        let version = version.finalize().to_hex();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cuda-{}", &version[..16]));
        let library = folder.join("libcuda.so.1");
        if library.exists() {
            return folder;
        }
        std::fs::create_dir_all(&folder).unwrap();
        // Tests are processes of their own, and several may be here.
        let building = tempfile::tempdir_in(&folder).unwrap();
        let built = building.path().join("libcuda.so.1");
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        rustc.args(["--edition", "2024", "--crate-type", "cdylib", "-C", "opt-level=1", "-o"]).arg(&built).arg(source);
        let output = rustc.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::rename(built, library).unwrap();
        folder
    })
}

/// True on a machine with NVIDIA's driver.
fn has_driver() -> bool {
    Path::new("/dev/nvidiactl").exists()
}

/// A repository with `base`: tensors of 6 MiB and 1 MiB of bytes, one of 12 bytes, and an empty one.
/// Its budget makes slots of 2 MiB.
fn with_weights() -> User {
    let user = User::with_repository();
    user.set_up("64M");
    user.write("base/model.safetensors", &safetensors(7, &[("a", 3 << 19), ("b", 1 << 18), ("c", 3), ("d", 0)]));
    user.ok(&["save", "base", "base"]);
    user
}

struct Outcome {
    code: Option<i32>,
    out: String,
    err: String,
    /// Counts of the driver; none if its context was never released.
    log: Option<Value>,
}

/// Runs `towline stage base --bench --device cuda:0 --json MORE` with the driver and its knobs.
fn load(user: &User, more: &[&str], knobs: &[(&str, &str)]) -> Outcome {
    let output = command(user, more, knobs).output().unwrap();
    let log = std::fs::read(user.work().join("cuda.log")).ok();
    Outcome {
        code: output.status.code(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
        log: log.map(|log| serde_json::from_slice(&log).unwrap()),
    }
}

fn command(user: &User, more: &[&str], knobs: &[(&str, &str)]) -> Command {
    let line = [&["stage", "base", "--bench", "--json", "--device", "cuda:0"], more].concat();
    let mut command = user.command(&line);
    command.env("LD_LIBRARY_PATH", driver()).env("SOFT_CUDA_LOG", user.work().join("cuda.log"));
    command.envs(knobs.iter().copied());
    command
}

impl Outcome {
    /// The error that a command ends with, and the counts.
    #[track_caller]
    fn error(self, code: i32) -> (Value, Option<Value>) {
        assert_eq!(self.code, Some(code), "{}", self.err);
        assert!(self.out.is_empty(), "{}", self.out);
        let error = self.err.lines().last().unwrap_or_default();
        let error: Value = serde_json::from_str(error).unwrap_or_else(|_| panic!("{}", self.err));
        (error["error"].clone(), self.log)
    }
}

fn error(user: &User, code: i32, knobs: &[(&str, &str)]) -> (Value, Option<Value>) {
    load(user, &[], knobs).error(code)
}

/// Flips a bit in the middle of the largest pack.
fn damage_largest_pack(user: &User) {
    let packs: Vec<PathBuf> = walk(&user.repository().join("pack"));
    let pack = packs.iter().max_by_key(|pack| pack.metadata().unwrap().len()).unwrap();
    let mut bytes = std::fs::read(pack).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::remove_file(pack).unwrap();
    std::fs::write(pack, bytes).unwrap();
}

const ON_GPU: &[&str] = &["--decode-on", "gpu"];

fn says(error: &Value, words: &str) -> bool {
    error["message"].as_str().unwrap().contains(words)
}

/// Nothing is left on the device.
#[track_caller]
fn is_released(log: Option<&Value>) {
    let log = log.expect("the context was released");
    for kind in ["allocated", "pinned", "pending", "streams", "modules", "running"] {
        assert_eq!(log[kind], 0, "{kind}: {log}");
    }
}

#[test]
fn tensors_arrive_as_they_were_saved() {
    let user = with_weights();
    let loaded = load(&user, &[], &[]);
    assert_eq!(loaded.code, Some(0), "{}", loaded.err);
    let report: Value = serde_json::from_str(&loaded.out).unwrap();
    has_members(&report, "name device tensors bytes fetched_bytes sources times overlap decoded_on_device compared");
    assert_eq!((&report["device"], &report["compared"]), (&"cuda:0 (Software GPU)".into(), &true.into()));
    assert_eq!((&report["tensors"], &report["bytes"]), (&4.into(), &(7 * 1024 * 1024 + 12).into()));
    let times = |stage: &str| report["times"][stage].as_f64().unwrap();
    assert!(times("copy") > 0.0 && times("decode") > 0.0 && times("first_tensor") <= times("total"), "{report}");
    is_released(loaded.log.as_ref());
    let log = loaded.log.unwrap();
    assert_eq!((&log["events"], &log["copied"]), (&0.into(), &report["bytes"]), "{log}");

    let some = load(&user, &["--tensor", "b[1:3]", "--tensor", "c"], &[]);
    let report: Value = serde_json::from_str(&some.out).unwrap();
    assert_eq!((&report["tensors"], &report["bytes"]), (&2.into(), &20.into()), "{report}");
}

#[test]
fn encoded_chunks_and_holes_arrive_too() {
    let user = User::with_repository();
    // Smooth values, which are stored as planes, and a hole.
    let mut file = safetensors(7, &[("a", 3 << 19), ("b", 1 << 18)]);
    let len = file.len();
    for (at, number) in file[len - (5 << 20)..].chunks_exact_mut(4).enumerate() {
        number.copy_from_slice(&(1.0 + at as f32 / 1e6).to_le_bytes());
    }
    file[len - (4 << 20)..len - (1 << 20)].fill(0);
    user.write("base/model.safetensors", &file);
    user.ok(&["save", "base", "base"]);
    let loaded = load(&user, &[], &[]);
    assert_eq!(loaded.code, Some(0), "{}", loaded.err);
    is_released(loaded.log.as_ref());
}

/// A repository with `base`: tensors that are stored raw, and as planes of all encodings that a GPU decodes, and in groups.
fn with_encoded_weights() -> User {
    let user = User::with_repository();
    user.set_up("64M");
    let mut file = safetensors(7, &[("raw", 1 << 17), ("coded", 1 << 17), ("few", (1 << 16) + 3)]);
    // No whole number of pages.
    let begins = file.len() - (5 << 18) - 12;
    for number in file[begins + (1 << 19)..begins + (2 << 19)].chunks_exact_mut(4) {
        // Eight exponents.
        let random = u32::from_le_bytes(number.try_into().unwrap());
        number.copy_from_slice(&(0x3c00_0000 + (random & 0x3ff_ffff)).to_le_bytes());
    }
    for (at, number) in file[begins + (2 << 19)..].chunks_exact_mut(4).enumerate() {
        number.copy_from_slice(&if at % 50 == 0 { 0.5_f32 } else { 0.0 }.to_le_bytes());
    }
    user.write("base/model.safetensors", &file);
    user.ok(&["save", "base", "base"]);
    user
}

/// Plain bytes that the GPU decoded and verified in a load that went well.
#[track_caller]
fn decoded_on_device(loaded: &Outcome) -> u64 {
    assert_eq!(loaded.code, Some(0), "{}", loaded.err);
    let report: Value = serde_json::from_str(&loaded.out).unwrap();
    assert_eq!(report["compared"], true);
    is_released(loaded.log.as_ref());
    report["decoded_on_device"].as_u64().unwrap()
}

#[test]
fn a_gpu_decodes_and_verifies_by_itself() {
    let user = with_encoded_weights();
    let loaded = load(&user, ON_GPU, &[]);
    // All but the chunks with the header, and those in groups.
    let decoded = decoded_on_device(&loaded);
    assert!(decoded > 3 << 18, "{decoded}: {:?}", loaded.log);
    assert!(loaded.log.unwrap()["launches"].as_u64().unwrap() >= 4);
    assert_eq!(decoded_on_device(&load(&user, &[], &[])), 0);
    // Boxes, whose bytes are not whole chunks.
    let some = load(&user, &["--decode-on", "gpu", "--tensor", "raw[5:900]"], &[]);
    assert_eq!(decoded_on_device(&some), 0);
}

/// Without kernels, or memory for them, the CPU decodes.
#[test]
fn a_gpu_that_cannot_decode_still_gets_its_tensors() {
    let user = with_encoded_weights();
    for fault in ["cuModuleLoadData:1:214", "cuModuleGetFunction:3:214", "cuMemAlloc_v2:2+:2"] {
        let loaded = load(&user, ON_GPU, &[("SOFT_CUDA_FAIL", fault), ("RUST_LOG", "warn")]);
        assert_eq!(decoded_on_device(&loaded), 0, "{fault}");
        assert!(loaded.err.contains("the GPU cannot decode chunks, the CPU does: "), "{fault}: {}", loaded.err);
    }
    let old = load(&user, ON_GPU, &[("SOFT_CUDA_KERNELS", "0")]);
    assert_eq!(decoded_on_device(&old), 0);
    let few = load(&user, ON_GPU, &[("SOFT_CUDA_MEMORY", "4000000")]);
    assert_eq!(decoded_on_device(&few), 0);
}

#[test]
fn faults_of_kernels_are_errors() {
    let user = with_encoded_weights();
    for fault in ["cuLaunchKernel:1:214", "cuLaunchKernel:3:214", "cuMemcpyDtoH_v2:1:214"] {
        let failed = load(&user, ON_GPU, &[("SOFT_CUDA_FAIL", fault)]);
        let (failed, log) = failed.error(1);
        assert!(failed.to_string().contains("CUDA_ERROR_ECC_UNCORRECTABLE"), "{fault}: {failed}");
        is_released(log.as_ref());
    }
}

/// A copy that changed a byte is found by the GPU: all is read again, and is right.
#[test]
fn a_gpu_finds_what_a_copy_changed() {
    let user = with_encoded_weights();
    let clean = load(&user, ON_GPU, &[]).log.unwrap();
    let healed = (1..=clean["copies"].as_u64().unwrap()).filter(|copy| {
        let copy = copy.to_string();
        let loaded = load(&user, ON_GPU, &[("SOFT_CUDA_CORRUPT", &copy)]);
        loaded.code == Some(0) && decoded_on_device(&loaded) == 0
    });
    assert!(healed.count() > 0, "{clean}");
}

/// The GPU finds the damage, and the CPU says where it is.
#[test]
fn damage_that_a_gpu_finds_is_told_as_ever() {
    let user = with_encoded_weights();
    damage_largest_pack(&user);
    let (damaged, log) = load(&user, ON_GPU, &[]).error(4);
    assert!(damaged["kind"] == "damaged" && says(&damaged, "damage in "), "{damaged}");
    is_released(log.as_ref());
}

#[test]
fn text_says_where_the_time_went() {
    let user = with_weights();
    let mut host = user.command(&["stage", "base", "--bench"]);
    let text = String::from_utf8(host.output().unwrap().stdout).unwrap();
    assert!(text.starts_with("base: 4 tensors, 7.0 MiB, loaded to host in "), "{text}");
    assert!(text.contains("first tensor complete after") && text.contains("overlap"), "{text}");
    let mut gpu = user.command(&["stage", "base", "--bench", "--device", "cuda"]);
    let text = String::from_utf8(gpu.env("LD_LIBRARY_PATH", driver()).output().unwrap().stdout).unwrap();
    assert!(text.contains("loaded to cuda:0 (Software GPU) in ") && text.contains("the same bytes"), "{text}");
}

/// Slow copies: threads wait for slots, which are used again and again.
#[test]
fn pinned_memory_stays_within_its_limit() {
    let user = with_weights();
    let slow = load(&user, &[], &[("SOFT_CUDA_DELAY_US", "20000")]);
    assert_eq!(slow.code, Some(0), "{}", slow.err);
    let log = slow.log.unwrap();
    assert!(log["pinned_most"].as_u64().unwrap() <= 16 << 20, "a quarter of the budget: {log}");
    assert!(log["pending_most"].as_u64().unwrap() > 1, "copies wait while others are filled: {log}");
    // Room for one slot.
    let narrow = load(&user, &[], &[("SOFT_CUDA_PINNED", "1100000"), ("SOFT_CUDA_DELAY_US", "2000")]);
    assert_eq!(narrow.code, Some(0), "{}", narrow.err);
    let log = narrow.log.unwrap();
    assert!(log["pinned_most"].as_u64().unwrap() <= 1_100_000 && log["pending_most"] == 1, "{log}");
}

#[test]
fn without_a_usable_gpu_the_error_says_why() {
    let user = with_weights();
    if !has_driver() {
        let none = user.fails(&["stage", "base", "--bench", "--device", "cuda:0"], 1);
        assert!(none["kind"] == "unsupported" && says(&none, "no CUDA driver on this machine"), "{none}");
    }
    let (none, _) = error(&user, 1, &[("SOFT_CUDA_DEVICES", "0")]);
    assert!(none["kind"] == "unsupported" && says(&none, "CUDA_ERROR_NO_DEVICE (100)"), "{none}");
    let (old, _) = error(&user, 1, &[("SOFT_CUDA_VERSION", "11010")]);
    assert!(
        old["kind"] == "unsupported" && says(&old, "expected version 11.2 of its API, or newer, got 11.1"),
        "{old}"
    );
    let mut other = command(&user, &[], &[]);
    let other = other.args(["--device", "cuda:3"]).output().unwrap();
    assert!(String::from_utf8_lossy(&other.stderr).contains("cannot be used multiple times"));
    let mut other = user.command(&["stage", "base", "--bench", "--device", "cuda:3", "--json"]);
    let other = other.env("LD_LIBRARY_PATH", driver()).output().unwrap();
    let error: Value = serde_json::from_slice(&other.stderr).unwrap();
    assert!(error["error"]["kind"] == "not-found" && error["error"]["place"] == "cuda:3", "{error}");
    let wrong = user.run(&["stage", "base", "--bench", "--device", "gpu"]);
    assert!(wrong.code == Some(2) && wrong.err.contains("host, or cuda:N"), "{}", wrong.err);
    assert_eq!(user.run(&["stage", "--list", "--bench"]).code, Some(2));
    let host = user.fails(&["stage", "base", "--bench", "--device", "host", "--decode-on", "gpu"], 2);
    assert!(says(&host, "--decode-on gpu needs a GPU to load to: got --device host"), "{host}");
    let wrong = user.run(&["stage", "base", "--bench", "--device", "cuda", "--decode-on", "tpu"]);
    assert!(wrong.code == Some(2) && wrong.err.contains("expected cpu or gpu, got \"tpu\""), "{}", wrong.err);
    let lacks = user.run(&["stage", "base", "--device", "cuda"]);
    assert!(lacks.code == Some(2) && lacks.err.contains("--bench"), "{}", lacks.err);
}

#[test]
fn too_little_memory_is_an_error_with_numbers() {
    let user = with_weights();
    let (small, log) = error(&user, 1, &[("SOFT_CUDA_MEMORY", "1000000")]);
    assert!(small["kind"] == "exhausted" && says(&small, "1000000 are free"), "{small}");
    is_released(log.as_ref());
    let (unpinned, log) = error(&user, 1, &[("SOFT_CUDA_PINNED", "1000")]);
    assert!(unpinned["kind"] == "exhausted" && says(&unpinned, "cannot pin host memory"), "{unpinned}");
    assert!(unpinned["help"].as_str().unwrap().contains("ulimit -l"), "{unpinned}");
    is_released(log.as_ref());
}

/// Faults of the device at each function, once and for good: an error, nothing handed over, no copy left when memory is freed.
#[test]
fn faults_of_the_device_are_errors() {
    let user = with_weights();
    let once = ["cuDevicePrimaryCtxRetain", "cuMemAlloc_v2", "cuStreamCreate"];
    let often = ["cuEventCreate", "cuEventRecord", "cuMemcpyHtoDAsync_v2", "cuEventSynchronize"];
    for function in once.into_iter().chain(often) {
        for at in ["1", "3", "1+", "4+"] {
            if once.contains(&function) && !at.starts_with('1') {
                continue;
            }
            let fault = format!("{function}:{at}:214");
            let (failed, log) = error(&user, 1, &[("SOFT_CUDA_FAIL", &fault), ("SOFT_CUDA_DELAY_US", "5000")]);
            assert!(failed.to_string().contains("CUDA_ERROR_ECC_UNCORRECTABLE"), "{fault}: {failed}");
            if function != "cuDevicePrimaryCtxRetain" {
                is_released(log.as_ref());
            }
        }
    }
}

/// A device that does not even say whether its copies have ended: what it may still read stays pinned, and nothing is freed there.
#[test]
fn memory_of_a_lost_device_stays_pinned() {
    let user = with_weights();
    let lost = ("SOFT_CUDA_FAIL", "cuMemcpyHtoDAsync_v2:3:214,cuStreamSynchronize:1+:214");
    let (error, log) = error(&user, 1, &[lost, ("SOFT_CUDA_DELAY_US", "50000")]);
    assert!(error.to_string().contains("CUDA_ERROR_ECC_UNCORRECTABLE"), "{error}");
    let log = log.unwrap();
    assert!(log["pinned"] != 0 && log["allocated"] != 0, "{log}");
}

#[test]
fn damage_never_reaches_the_device() {
    let user = with_weights();
    damage_largest_pack(&user);
    let (damaged, log) = error(&user, 4, &[]);
    assert!(damaged["kind"] == "damaged" && says(&damaged, "damage in "), "{damaged}");
    is_released(log.as_ref());
    assert!(log.unwrap()["copied"].as_u64().unwrap() < 7 << 20);
}

#[test]
fn a_copy_that_changed_bytes_is_found_when_it_is_read_back() {
    let user = with_weights();
    let (differs, log) = error(&user, 1, &[("SOFT_CUDA_CORRUPT", "2")]);
    assert!(says(&differs, "memory of the GPU differs"), "{differs}");
    is_released(log.as_ref());
}

#[test]
fn an_interrupted_load_leaves_nothing_on_the_device() {
    let user = with_weights();
    let copying = user.work().join("copying");
    let knobs = [("SOFT_CUDA_DELAY_US", "500000"), ("SOFT_CUDA_COPYING", copying.to_str().unwrap())];
    let mut running = command(&user, &[], &knobs).spawn().unwrap();
    while !copying.exists() {
        assert_eq!(running.try_wait().unwrap(), None);
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_process(Pid::from_child(&running), Signal::INT).unwrap();
    assert_eq!(running.wait().unwrap().code(), Some(130));
    let log = std::fs::read(user.work().join("cuda.log")).ok();
    is_released(log.map(|log| serde_json::from_slice(&log).unwrap()).as_ref());
}

/// Valgrind ends with 99 where memory is used that is freed or not allocated, or a decision depends on bytes that nobody wrote.
#[test]
fn valgrind_finds_no_wrong_use_of_memory() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        return missing("valgrind is not there: tests/servers/setup.sh installs it");
    }
    let user = with_encoded_weights();
    let fault = ("SOFT_CUDA_FAIL", "cuMemcpyHtoDAsync_v2:2:214");
    for (more, knobs, code) in [(ON_GPU, &[][..], 0), (&[], &[fault], 1)] {
        let load = command(&user, more, knobs);
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--quiet", "--error-exitcode=99"]).arg(load.get_program()).args(load.get_args());
        let set = load.get_envs().filter_map(|(name, value)| Some((name, value?)));
        valgrind.env_clear().envs(set).env("PATH", std::env::var_os("PATH").unwrap()).current_dir(user.work());
        let output = valgrind.output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// benches/gpu/run.sh, which has no GPU here: its figures mean nothing, but it runs.
#[test]
fn the_bench_of_gpus_runs_and_says_where_there_is_none() {
    let out = tempfile::tempdir().unwrap();
    let bench = |driver: Option<&Path>| {
        let mut bench = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/gpu/run.sh"));
        bench
            .env("TOWLINE", env!("CARGO_BIN_EXE_towline"))
            .env("OUT", out.path())
            .env("GPU_MIB", "8")
            .env("GPU_RUNS", "1");
        bench
            .env("HOME", out.path())
            .env_remove("LD_LIBRARY_PATH")
            .envs(driver.map(|driver| ("LD_LIBRARY_PATH", driver)));
        let output = bench.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    if !has_driver() {
        assert_eq!(bench(None), "nothing measured: no CUDA driver on this machine\n");
        assert!(!out.path().join("gpu.md").exists());
    }
    let table = bench(Some(driver()));
    assert!(table.starts_with("Software GPU, ") && table.matches("| cuda:0 (Software GPU) |").count() == 4, "{table}");
    assert_eq!(std::fs::read_to_string(out.path().join("gpu.md")).unwrap(), table);
}

fn walk(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}
