//! Latency, throughput and clock of the store. Speeds are reported, never judged.

use std::io::Read as _;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::try_join_all;
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::path::Path;
use object_store::{GetResultPayload, ObjectStore, ObjectStoreExt as _};

use super::{Check, Outcome};
use crate::clock::{Clock as _, SystemClock, Timestamp};
use crate::error::{Error, ErrorKind, Result};
use crate::limits::MIB;
use crate::progress::Progress;
use crate::storage::{Store, scratch};
use crate::work::blocking;

/// Number and size of objects moved at once each way: large enough to amortize round trips, and small enough to be fast.
const AT_ONCE: (usize, u64) = (8, 4 * MIB);
/// Number of small reads, of which the median counts.
const READS: usize = 9;
/// Maximum number of keys that are listed to be removed: more than are written.
const KEYS_MAX: usize = 1000;
/// S3 refuses requests whose clock is a quarter of an hour off
/// (<https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html>, `RequestTimeTooSkewed`); the warning comes
/// before that.
const SKEW_MAX: Duration = Duration::from_mins(5);

/// Latency, clock, and throughput both ways.
pub(super) async fn rates(store: &Store, progress: &Progress) -> Vec<Check> {
    let root = scratch();
    let objects = &**store.objects();
    let mut checks = match small(objects, &root.clone().join("small")).await {
        Ok(checks) => checks.into(),
        Err(error) => vec![failed("latency", &error)],
    };
    match large(objects, &root, progress).await {
        Ok(times) => checks.extend(throughput(times, store)),
        Err(error) => checks.push(failed("throughput", &error)),
    }
    sweep(objects, &root).await;
    checks
}

fn failed(what: &str, error: &Error) -> Check {
    // A disk without space for the probe cannot be measured.
    let untried = matches!(error.kind(), ErrorKind::Denied | ErrorKind::Exhausted);
    let outcome = if untried { Outcome::Warn } else { Outcome::Bad };
    Check::failed(what, outcome, error)
}

async fn small(objects: &dyn ObjectStore, key: &Path) -> Result<[Check; 2]> {
    let before = SystemClock.now();
    objects.put(key, noise(1 << 10).into()).await?;
    let after = SystemClock.now();
    let written = objects.head(key).await?.last_modified.timestamp_nanos_opt();
    let mut times = Vec::with_capacity(READS);
    for _ in 0..READS {
        let start = Instant::now();
        objects.get(key).await?.bytes().await?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    let median = times.get(READS / 2).copied().unwrap_or_default();
    Ok([Check::ok("latency", latency(median)), clock(before, written.map(Timestamp), after)])
}

/// Linux delays acknowledgements by 40 ms, which a server that waits for them (Nagle's algorithm, RFC 896) adds to each
/// small answer. Ceph RGW does, unless told otherwise (<https://docs.ceph.com/en/latest/radosgw/frontends/>,
/// `tcp_nodelay`).
fn latency(median: Duration) -> String {
    let text = format!("{:.1} ms for a small read, the median of {READS}", median.as_secs_f64() * 1e3);
    let delayed = (40..50).contains(&median.as_millis());
    if delayed { text + "; if the store is near and is Ceph RGW, set tcp_nodelay=1 in its frontend" } else { text }
}

/// `written`: the store's time of something done between `before` and `after`; it may be cut to whole seconds.
fn clock(before: Timestamp, written: Option<Timestamp>, after: Timestamp) -> Check {
    const WHAT: &str = "clock";
    let Some(written) = written else { return Check::warn(WHAT, "the store does not say when objects were written") };
    let (behind, ahead) = (before.since(written), written.since(after));
    let (skew, way) = if behind > ahead { (behind, "behind") } else { (ahead, "ahead of") };
    let text = humantime::format_duration(Duration::from_secs(skew.as_secs()));
    if skew > SKEW_MAX {
        Check::warn(WHAT, format!("the store's is {text} {way} this machine's; S3 refuses requests beyond 15 minutes"))
            .help("set this machine's clock, by NTP: timedatectl set-ntp true")
    } else if skew > Duration::from_secs(1) {
        Check::ok(WHAT, format!("the store's is {text} {way} this machine's"))
    } else {
        Check::ok(WHAT, "the store's agrees with this machine's")
    }
}

/// Times of writing and of reading back [`AT_ONCE`].
async fn large(objects: &dyn ObjectStore, root: &Path, progress: &Progress) -> Result<[Duration; 2]> {
    let (count, each) = AT_ONCE;
    let parts: Vec<(Path, Bytes)> =
        (0..count).map(|n| (root.clone().join(format!("large-{n}")), noise(each))).collect();
    progress.phase("measuring", 2 * count as u64 * each);
    let start = Instant::now();
    try_join_all(parts.iter().map(|(key, body)| async move {
        objects.put(key, body.clone().into()).await?;
        progress.advance(each);
        progress.moved(each);
        Ok::<_, Error>(())
    }))
    .await?;
    let up = start.elapsed();
    let start = Instant::now();
    try_join_all(parts.iter().map(|(key, body)| read_back(objects, key, body, progress))).await?;
    Ok([up, start.elapsed()])
}

/// Reads `key` and compares it with the bytes written.
async fn read_back(objects: &dyn ObjectStore, key: &Path, written: &Bytes, progress: &Progress) -> Result<()> {
    let mut arriving = match objects.get(key).await?.payload {
        // Reads like a restore from a local file: whole ranges, on a blocking thread.
        GetResultPayload::File(mut file, _) => {
            let read = blocking(move || {
                let mut bytes = Vec::new();
                file.read_to_end(&mut bytes).map_err(|e| Error::other("file cannot be read").source(e))?;
                Ok(Bytes::from(bytes))
            });
            futures::stream::iter([Ok(read.await?)]).boxed()
        }
        GetResultPayload::Stream(stream) => stream,
    };
    let mut rest: &[u8] = written;
    while let Some(bytes) = arriving.try_next().await? {
        rest = rest.strip_prefix(&*bytes).ok_or_else(|| wrong(key))?;
        progress.advance(bytes.len() as u64);
        progress.moved(bytes.len() as u64);
    }
    if rest.is_empty() { Ok(()) } else { Err(wrong(key)) }
}

fn wrong(key: &Path) -> Error {
    Error::damaged("store does not give back what was written").at(key).help("do not keep anything there")
}

fn throughput([up, down]: [Duration; 2], store: &Store) -> [Check; 2] {
    let (count, each) = AT_ONCE;
    let text = |time: Duration| {
        let rate = count as f64 * each as f64 / time.as_secs_f64().max(1e-9) / 1e6;
        format!("{rate:.0} MB/s, {count} objects of {} MiB at once", each / MIB)
    };
    let cached = if store.directory().is_some() { ", from the page cache" } else { "" };
    [Check::ok("upload", text(up)), Check::ok("download", text(down) + cached)]
}

/// Random bytes, which are not compressible or cached.
fn noise(len: u64) -> Bytes {
    let mut bytes = vec![0; usize::try_from(len).unwrap_or_default()];
    let seed = ulid::Ulid::generate().to_bytes();
    blake3::Hasher::new().update(&seed).finalize_xof().fill(&mut bytes);
    bytes.into()
}

/// Removes the objects written, as far as the store allows.
async fn sweep(objects: &dyn ObjectStore, root: &Path) {
    let keys = objects.list(Some(root)).map_ok(|meta| meta.location).take(KEYS_MAX).boxed();
    let mut deleted = objects.delete_stream(keys);
    while let Some(outcome) = deleted.next().await {
        if let Err(error) = outcome {
            tracing::warn!(%error, at = %root, "what was written to measure could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp(seconds * 1_000_000_000)
    }

    #[test]
    fn a_clock_is_off_only_outside_of_what_the_request_took() {
        let seen = |written| clock(at(1000), Some(at(written)), at(1010));
        assert_eq!(seen(1005).detail, "the store's agrees with this machine's");
        assert_eq!(seen(999).detail, "the store's agrees with this machine's");
        assert_eq!(seen(970).detail, "the store's is 30s behind this machine's");
        assert_eq!(seen(970).outcome, Outcome::Ok);
        let ahead = seen(1010 + 600);
        assert_eq!(ahead.outcome, Outcome::Warn);
        assert!(ahead.detail.contains("10m ahead of"), "{}", ahead.detail);
        assert_eq!(clock(at(0), None, at(0)).outcome, Outcome::Warn);
    }
}
