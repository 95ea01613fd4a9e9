//! Limits of this machine: descriptors, memory, cores, socket buffers, the disk of the local cache.

use std::path::Path;

use rustix::fs::{Access, access, statvfs};
use rustix::process::{Resource, getrlimit};

use super::{Check, Outcome, size};
use crate::budget::Budget;
use crate::limits::{MEMORY_MIN, MIB};
use crate::repository::default_cache;

/// Files and connections that a busy save or restore holds at once, with room.
const OPEN_FILES_MIN: u64 = 4096;
/// Bytes of socket buffer below which QUIC loses packets on fast links
/// (<https://github.com/quic-go/quic-go/wiki/UDP-Buffer-Sizes>).
const UDP_BUFFER_MIN: u64 = 7_500_000;
/// Free bytes below which the index of a large repository may not fit into the local cache.
const CACHE_FREE_MIN: u64 = 64 * MIB;

/// All of them.
pub(super) fn machine() -> Vec<Check> {
    let limit = getrlimit(Resource::Nofile);
    let buffers = ["rmem_max", "wmem_max"].map(|name| {
        let text = std::fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok();
        text.and_then(|text| text.trim().parse().ok())
    });
    vec![
        open_files(limit.current, limit.maximum),
        udp_buffers(buffers),
        memory(Budget::memory_bytes()),
        match default_cache() {
            Ok(folder) => local_cache(&folder),
            Err(error) => Check::failed(LOCAL_CACHE, Outcome::Warn, &error),
        },
    ]
}

const LOCAL_CACHE: &str = "local cache";

/// The disk that `folder` is on, or will be once it is made.
fn local_cache(folder: &Path) -> Check {
    let there = folder.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(folder);
    if !there.is_dir() {
        return Check::warn(LOCAL_CACHE, format!("{} is not a folder: nothing is cached", there.display()))
            .help("remove it, or set XDG_CACHE_HOME to a folder");
    }
    let free = match statvfs(there) {
        Ok(found) => found.f_bavail.saturating_mul(found.f_frsize),
        Err(error) => return Check::warn(LOCAL_CACHE, format!("cannot be inspected: {error}: {}", there.display())),
    };
    let detail = format!("{} free at {}", size(free), folder.display());
    if access(there, Access::WRITE_OK).is_err() {
        return Check::warn(LOCAL_CACHE, format!("{} may not be written: nothing is cached", there.display()))
            .help("change its mode, or set XDG_CACHE_HOME to a folder of your own");
    }
    if free < CACHE_FREE_MIN {
        return Check::warn(LOCAL_CACHE, format!("{detail}: without it each command fetches the index from S3 again"))
            .help("free some space there, or set XDG_CACHE_HOME to a folder on another disk");
    }
    Check::ok(LOCAL_CACHE, detail)
}

fn open_files(now: Option<u64>, most: Option<u64>) -> Check {
    const WHAT: &str = "open files";
    match now {
        None => Check::ok(WHAT, "no limit"),
        Some(now) if now >= OPEN_FILES_MIN => Check::ok(WHAT, format!("{now} may be open")),
        Some(now) => {
            let raise = format!("ulimit -n {OPEN_FILES_MIN}");
            let help = match most {
                Some(most) if most < OPEN_FILES_MIN => format!("as root: {raise}, or raise nofile in limits.conf"),
                _ => raise,
            };
            Check::warn(WHAT, format!("only {now} may be open")).help(help)
        }
    }
}

/// `buffers`: the most that a socket may ask for, to receive and to send, in bytes.
fn udp_buffers(buffers: [Option<u64>; 2]) -> Check {
    const WHAT: &str = "UDP buffers";
    let [Some(receive), Some(send)] = buffers else {
        return Check::ok(WHAT, "/proc/sys/net/core does not show the limits here; they matter for QUIC between peers")
            .help("look on the host: sysctl net.core.rmem_max net.core.wmem_max");
    };
    let detail = format!("up to {} to receive, {} to send", size(receive), size(send));
    if receive.min(send) >= UDP_BUFFER_MIN {
        return Check::ok(WHAT, detail);
    }
    let low = [("net.core.rmem_max", receive), ("net.core.wmem_max", send)].into_iter();
    let settings =
        low.filter(|(_, bytes)| *bytes < UDP_BUFFER_MIN).map(|(name, _)| format!(" {name}={UDP_BUFFER_MIN}"));
    // No trouble yet: nothing of this version uses UDP.
    Check::ok(
        WHAT,
        format!("{detail}: enough for directories and S3; QUIC between peers on a fast link will want more"),
    )
    .help(format!("as root: sysctl -w{}", settings.collect::<String>()))
}

/// `allowed`: what the cgroup or the machine has, in bytes.
fn memory(allowed: u64) -> Check {
    const WHAT: &str = "memory";
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (budget, all) = (size(Budget::default_bytes()), size(allowed));
    let detail = format!("buffers up to {budget} unless --memory says otherwise, of {all}; {cores} cores");
    if allowed < 2 * MEMORY_MIN {
        return Check::warn(WHAT, detail).help(format!("give the container {} or more", size(2 * MEMORY_MIN)));
    }
    Check::ok(WHAT, detail)
}

#[cfg(test)]
mod tests {
    use super::super::Outcome;
    use super::*;

    #[test]
    fn low_limits_come_with_the_command_that_raises_them() {
        assert_eq!(open_files(Some(1024), Some(1 << 20)).help.unwrap(), "ulimit -n 4096");
        assert!(open_files(Some(1024), Some(1024)).help.unwrap().starts_with("as root"));
        assert_eq!(open_files(Some(4096), None).outcome, Outcome::Ok);
        assert_eq!(open_files(None, None).outcome, Outcome::Ok);

        let low = udp_buffers([Some(212_992), Some(8 << 20)]);
        assert_eq!(low.help.as_deref().unwrap(), "as root: sysctl -w net.core.rmem_max=7500000");
        assert_eq!(udp_buffers([Some(8 << 20); 2]).outcome, Outcome::Ok);
        assert_eq!(low.outcome, Outcome::Ok);
        assert_eq!(udp_buffers([None, Some(8 << 20)]).outcome, Outcome::Ok);

        assert_eq!(memory(8 << 30).outcome, Outcome::Ok);
        assert_eq!(memory(100 << 20).outcome, Outcome::Warn);
    }
}
